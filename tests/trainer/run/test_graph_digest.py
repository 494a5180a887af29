"""Digests of traced functions: which functions differ, and which do not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.warm_processes import warm_python
from trainer.core.run.graph_digest import digest
from trainer.tf_compat import tf

SPEC = tf.TensorSpec((4, 3), tf.float32)


def _digest(function: Callable[[Any], Any]) -> str:
    return digest(tf.function(function).get_concrete_function(SPEC))


def _loop(limit: int, factor: float) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        return tf.while_loop(
            lambda i, _: i < limit, lambda i, y: (i + 1, factor * y), (0, x)
        )

    return run


def _inner(power: int) -> Callable[[Any], Any]:
    called = tf.function(lambda x: x**power)
    return lambda x: called(x) + 1.0


def _chain(length: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for _ in range(length):
            x = tf.sin(x)
        return x

    return run


_DEEP = sys.getrecursionlimit() + 1
_TABLES = [tf.Variable(tf.ones(3), name=name) for name in ("left", "right")]
_CAPTURED = [tf.constant(np.full(3, value, "f4")) for value in (1, 2)]
_WORDS = [tf.constant([word, "b"]) for word in ("a", "c")]


def _two_writes(first: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        values = [tf.reduce_sum(x), tf.reduce_max(x)]
        _TABLES[0][0].assign(values[first])
        _TABLES[0][0].assign(values[1 - first])
        return x

    return run


def _compiled(whether: bool) -> Callable[[Any], Any]:
    called = tf.function(tf.sin, jit_compile=whether)
    return lambda x: called(x)


#: Two functions of each kind.
PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "operation": (tf.sin, tf.cos),
    "constant": (lambda x: 2.0 * x, lambda x: 3.0 * x),
    "attribute": (lambda x: tf.cumsum(x), lambda x: tf.cumsum(x, exclusive=True)),
    "order-of-inputs": (lambda x: x - tf.sin(x), lambda x: tf.sin(x) - x),
    "which-output": (
        lambda x: tf.split(x, 3, 1)[0], lambda x: tf.split(x, 3, 1)[1]
    ),
    "what-is-returned": (
        lambda x: (tf.sin(x), tf.cos(x)), lambda x: (tf.cos(x), tf.sin(x))
    ),
    "condition-of-a-loop": (_loop(3, 2.0), _loop(4, 2.0)),
    "body-of-a-loop": (_loop(3, 2.0), _loop(3, 4.0)),
    "inner-function": (_inner(2), _inner(3)),
    "captured-value": (lambda x: x + _CAPTURED[0], lambda x: x + _CAPTURED[1]),
    "captured-words": (
        lambda x: (x, tf.strings.length(_WORDS[0])),
        lambda x: (x, tf.strings.length(_WORDS[1])),
    ),
    "which-variable": (
        lambda x: x + _TABLES[0] - 2 * _TABLES[1],
        lambda x: x + _TABLES[1] - 2 * _TABLES[0],
    ),
    "order-of-effects": (_two_writes(0), _two_writes(1)),
    "compiled": (_compiled(False), _compiled(True)),
    # Longer than Python would recurse.
    "long-chain": (_chain(_DEEP), _chain(_DEEP + 1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_functions_that_compute_other_things_differ_and_a_second_trace_does_not(
    kind: str,
) -> None:
    left, right = PAIRS[kind]
    found = _digest(left)
    assert found == _digest(left)
    assert found != _digest(right)


def test_names_and_the_order_of_independent_operations_do_not_count() -> None:
    def left(x: Any) -> Any:
        a = tf.sin(x, name="first")
        return a + tf.cos(x)

    def right(x: Any) -> Any:
        b = tf.cos(x)
        return tf.sin(x, name="second") + b

    assert _digest(left) == _digest(right)


_CHILD = """
    import sys
    sys.path.insert(0, {root!r})
    from trainer.core.run.graph_digest import digest
    from trainer.tf_compat import keras, tf
    for _ in range({before}):  # other names of functions, other numbers
        tf.function(lambda x: tf.while_loop(lambda y: y < 2.0, tf.exp, (x,)))(1.0)
        tf.custom_gradient(lambda x: (x, lambda g: g))(tf.constant(1.0))
    model = keras.Sequential([
        keras.Input((6,)), keras.layers.Embedding(7, 4), keras.layers.LSTM(4),
        keras.layers.Reshape((2, 2)), keras.layers.Conv1D(2, 2),
        keras.layers.GRU(3),
        keras.layers.Dense(1, activation="gelu"),
    ])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    @tf.custom_gradient
    def mine(x):
        return x * 2.0, lambda g: 3.0 * g
    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(mine(tf.map_fn(
                lambda one: model(one[tf.newaxis])[0], ids,
                fn_output_signature=tf.float32)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    spec = tf.TensorSpec((3, 6), tf.int32)
    print(digest(step.get_concrete_function(spec)))
"""


@pytest.mark.thorough
def test_other_processes_have_the_same_digest(root: Any) -> None:
    found = []
    for before, python in ((0, warm_python()), (3, sys.executable)):
        code = textwrap.dedent(_CHILD.format(root=str(root), before=before))
        done = subprocess.run(
            [python, "-c", code], capture_output=True, check=True, text=True,
        )  # fmt: skip
        found.append(done.stdout)
    assert len(found[0].strip()) == 64
    assert found[0] == found[1]
