"""What a traced step writes, what it reads, and what no checkpoint could hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from trainer.core.run.captured_state import CapturedState
from trainer.tf_compat import tf

_READ, _WRITTEN = (tf.Variable([1.0, 2.0], name=name) for name in ("read", "written"))


def _state(function: Callable[[Any], Any]) -> CapturedState:
    spec = tf.TensorSpec((2,), tf.float32)
    traced = tf.function(function, autograph=False).get_concrete_function(spec)
    return CapturedState(traced)


def _in_a_branch(x: Any) -> Any:
    return tf.cond(x[0] > 0, lambda: _READ + x, lambda: _WRITTEN.assign_add(x) + _READ)


def _in_a_loop(x: Any) -> Any:
    return tf.while_loop(
        lambda i, _: i < 3,
        lambda i, y: (i + 1, y + _READ + _WRITTEN.assign(y)),
        (0, x),
    )


_INNER = tf.function(lambda x: tf.function(_WRITTEN.assign_sub)(x) * _READ)

WRITES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: _WRITTEN.assign(x * _READ),
    "one value": lambda x: _WRITTEN[1].assign(x[0] + tf.gather(_READ, 0)),
    "rows": lambda x: _WRITTEN.scatter_add(tf.IndexedSlices(x * _READ, [0, 1])),
    "branch": _in_a_branch,
    "loop": _in_a_loop,
    "inner function": lambda x: _INNER(_INNER(x) + _READ),
    "values by index": lambda x: _WRITTEN.assign(x) + tf.gather_nd(_READ, [[0], [1]]),
}


@pytest.mark.parametrize("how", WRITES)
def test_all_that_a_step_writes_is_known_and_what_it_only_reads(how: str) -> None:
    state = _state(WRITES[how])
    assert [v.name for v in state.written(but=[])] == ["written:0"]
    assert state.written(but=[_WRITTEN]) == []
    names = sorted(name for name, _ in state.values(but=[]))
    assert names == [
        f"variable {name} (float32, shape (2,))" for name in ("read", "written")
    ]


def test_digests_follow_the_values() -> None:
    state = _state(lambda x: x * _READ)
    before = state.values(but=[])
    _READ.assign([1.0, np.nextafter(np.float32(2), np.float32(3))])
    changed = state.values(but=[])
    _READ.assign([1.0, 2.0])
    assert changed != before == state.values(but=[])


def _table(entries: dict[str, float]) -> Any:
    keys, values = tf.constant([*entries]), tf.constant([*entries.values()])
    initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
    return tf.lookup.StaticHashTable(initializer, 0.0)


def test_digests_follow_the_entries_of_tables_in_any_order() -> None:
    def values(entries: dict[str, float]) -> list[list[str]]:
        table = _table(entries)
        words = tf.constant(["a", "b"])
        return _state(lambda x: x + table.lookup(words)).values(but=[])

    found = values({"a": 1.0, "b": 2.0})
    assert found == values({"b": 2.0, "a": 1.0})
    assert found != values({"a": 1.0, "b": 2.5})
    assert found != values({"a": 1.0, "b": 2.0, "c": 3.0})


_MUTABLE = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
_ZERO = tf.constant([0], tf.int64)


def _grow(x: Any) -> Any:
    _MUTABLE.insert(_ZERO, x[:1])
    return x


def _alias(x: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(
        resource=tf.identity(_READ.handle), dtype=tf.float32
    )


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "random numbers": ("RandomUniform", lambda x: x + tf.random.uniform((2,))),
    "in a loop": (
        "RandomUniform", lambda x: tf.map_fn(lambda y: y + tf.random.uniform(()), x)
    ),
    "Python": ("PyFunc", lambda x: tf.numpy_function(np.sin, [x], tf.float32)),
    "Python without state": (
        "PyFuncStateless",
        lambda x: tf.numpy_function(np.sin, [x], tf.float32, stateful=False),
    ),
    "eager Python": ("EagerPyFunc", lambda x: tf.py_function(tf.sin, [x], tf.float32)),
    "a table that grows": ("LookupTableInsertV2", _grow),
    "another handle": ("ReadVariableOp", _alias),
    "a variable of the graph": (
        "VarHandleOp", lambda x: tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(2,))
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_state_that_no_checkpoint_holds_is_refused(what: str) -> None:
    kind, function = REFUSED[what]
    with pytest.raises(InputError, match=rf"operation {kind} has state") as caught:
        _state(function)
    assert "\n" not in str(caught.value)


def test_assertions_and_numbers_of_a_seed_have_no_state() -> None:
    def draw(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_positive(x)]):
            return x + tf.random.stateless_uniform((2,), [1, 2])

    assert _state(draw).values(but=[]) == []
