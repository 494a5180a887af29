"""A traced function that does more than compute its results is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from trainer.core.step.pure_graph import check_pure, impurity
from trainer.core.tf_compat import tf

STATE = tf.Variable(1.0)
TABLE = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
FIXED = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2.0]), 0.0)


def _in_a_branch(values: Any) -> Any:
    tf.cond(values[0] > 1e6, lambda: STATE.assign_add(1.0), STATE.read_value)
    return values


def _in_a_gradient(values: Any) -> Any:
    @tf.custom_gradient
    def remembered(x: Any) -> Any:
        def grad(slope: Any) -> Any:
            STATE.assign(tf.reduce_sum(slope))
            return slope

        return tf.identity(x), grad

    with tf.GradientTape() as tape:
        tape.watch(values)
        result = tf.reduce_sum(remembered(values))
    return tape.gradient(result, values)


def _in_a_hash_table(values: Any) -> Any:
    TABLE.insert(tf.cast(values, tf.int64), values)
    return values


def _printed(values: Any) -> Any:
    tf.print(values)
    return values


def _asserted(values: Any) -> Any:
    tf.debugging.assert_positive(values)
    return values


#: More than functions.
IMPURE: dict[str, Callable[[Any], Any]] = {
    "a file that is read": lambda x: (
        x + tf.strings.to_number(tf.io.read_file("number.txt"))
    ),
    "a file of a debugger": lambda x: tf.raw_ops.DebugIdentity(
        input=x, debug_urls=["file:///tmp/x"]
    ),
    "a file that describes messages": lambda x: (
        tf.io.decode_proto(
            "", "m", ["x"], [tf.float32], descriptor_source="m.pb"
        ).values[0]
        + x
    ),
    "memory as it is": lambda x: x + tf.raw_ops.Empty(shape=[3], dtype=tf.float32),
    "a function that waits for other examples": tf.nondifferentiable_batch_function(
        1, 64, 1000
    )(lambda x: tf.cumsum(x, 0)),
    "an assignment in a branch": _in_a_branch,
    "an assignment in a custom gradient": _in_a_gradient,
    "a table that grows": _in_a_hash_table,
    "random numbers": lambda v: v + tf.random.normal(v.shape, seed=1),
    "a print": _printed,
    "a Python function": lambda v: tf.py_function(lambda x: x, [v], tf.float32),
    "a NumPy function called stateless": lambda v: tf.numpy_function(
        lambda x: x, [v], tf.float32, stateful=False
    ),
}

PURE: dict[str, Callable[[Any], Any]] = {
    "a read": lambda v: v * STATE,
    "a look-up": lambda v: FIXED.lookup(tf.cast(v, tf.int32)),
    "a branch": lambda v: tf.cond(v[0] > 0, lambda: v * STATE, lambda: v),
    "a loop": lambda v: tf.while_loop(
        lambda x: tf.reduce_sum(x) < 9.0, lambda x: [x + 1.0], [v]
    )[0],
    "random numbers of a seed": lambda v: v + tf.random.stateless_normal((3,), (1, 2)),
    "assertions": lambda v: tf.debugging.check_numerics(_asserted(v), "no"),
}


def _graph(function: Callable[[Any], Any]) -> Any:
    traced = tf.function(function).get_concrete_function(tf.TensorSpec((3,)))
    return traced, traced.graph


@pytest.mark.parametrize("name", IMPURE)
def test_every_operation_with_a_state_of_its_own_is_found(name: str) -> None:
    _kept, graph = _graph(IMPURE[name])
    with pytest.raises(InputError, match="a function of its inputs") as caught:
        check_pure(graph, "it")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PURE)
def test_reads_are_no_finding(name: str) -> None:
    kept, graph = _graph(PURE[name])
    assert impurity(graph) is None
    assert np.isfinite(kept(tf.ones(3))).all()
