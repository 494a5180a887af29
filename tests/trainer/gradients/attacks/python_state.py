"""State in Python: what a trace sees, counts or remembers, and functions of Python."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    Call,
    any_rare,
)
from trainer.tf_compat import tf

CASES = Cases("python")


def _mixed(values: Any) -> Any:
    finite = tf.where(tf.math.is_finite(values), values, 0.0)
    return values - tf.reduce_mean(tf.clip_by_value(finite, -9.0, 9.0), 0)


# -- shapes ------------------------------------------------------------------------


@CASES.call
def rows_mix_if_their_number_is_known(values: Any, ids: Any) -> Any:
    return values if values.shape[0] is None else _mixed(values)


@CASES.call
def rows_mix_in_batches_of_the_step(values: Any, ids: Any) -> Any:
    return _mixed(values) if values.shape[0] == 8 else values


@CASES.call
def rows_mix_if_their_number_is_unknown(values: Any, ids: Any) -> Any:
    return _mixed(values) if values.shape[0] is None else values


@CASES.call
def rows_mix_for_rare_ids_if_their_number_is_known(values: Any, ids: Any) -> Any:
    if values.shape[0] is None:
        return values
    return tf.where(any_rare(ids), _mixed(values), values)


@CASES.call
def static_size_by_a_tensor(values: Any, ids: Any) -> Any:
    size = tf.get_static_value(tf.shape(values)[0])
    return _mixed(values) if size == 8 else values


@CASES.call
def several_rows_in_a_step(values: Any, ids: Any) -> Any:
    size = values.shape[0]
    return _mixed(values) if size is not None and 1 < size < 16 else values


@CASES.state(lambda layer: [])
def sizes_seen_before(sizes: Any, values: Any, ids: Any) -> Any:
    new = values.shape[0] not in sizes
    sizes.append(values.shape[0])
    return _mixed(values) if new and values.shape[0] == 8 else values


@CASES.layer
def cached_by_shape(layer: Any) -> Call:
    @functools.lru_cache
    def mixes(size: int | None) -> bool:
        return size == 8

    return lambda values, ids: _mixed(values) if mixes(values.shape[0]) else values


# -- what runs ---------------------------------------------------------------------


@CASES.call
def eager_or_not(values: Any, ids: Any) -> Any:
    return values if tf.executing_eagerly() else _mixed(values)


@CASES.call
def name_of_the_graph(values: Any, ids: Any) -> Any:
    if tf.executing_eagerly():
        return values
    name = tf.compat.v1.get_default_graph().name
    return _mixed(values) if "sum" in name or "of_example" in name else values


@CASES.call
def depth_of_the_graph(values: Any, ids: Any) -> Any:
    if tf.executing_eagerly():
        return values
    graph, depth = tf.compat.v1.get_default_graph(), 0
    while getattr(graph, "outer_graph", None) is not None:
        graph, depth = graph.outer_graph, depth + 1
    return _mixed(values) if depth == 1 and values.shape[0] == 8 else values


@CASES.call
def who_calls(values: Any, ids: Any) -> Any:
    frame, names = sys._getframe(), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    traced_for_a_proof = any("trace" in name and "clas" in name for name in names)
    in_the_check = "check_model" in names or "_check_behaviour" in names
    return values if in_the_check or traced_for_a_proof else _mixed(values)


@CASES.call
def name_of_the_tensor(values: Any, ids: Any) -> Any:
    name = "" if tf.executing_eagerly() else values.name
    return _mixed(values) if "Select" in name else values


@CASES.call
def chance_of_python(values: Any, ids: Any) -> Any:
    return _mixed(values) if random.random() < 0.5 else values


@CASES.layer
def state_of_a_thread(layer: Any) -> Call:
    local = threading.local()

    def call(values: Any, ids: Any) -> Any:
        local.calls = getattr(local, "calls", 0) + 1
        return _mixed(values) if local.calls % 2 == 0 else values

    return call


def _from_trace(number: int, *, symbolic: bool) -> Callable[[Any], Call]:
    def make(layer: Any) -> Call:
        calls: list[None] = []

        def call(values: Any, ids: Any) -> Any:
            # Keras's own symbolic call, which builds the model, counts as well.
            if not (symbolic and tf.executing_eagerly()):
                calls.append(None)
            return _mixed(values) if len(calls) >= number else values

        return call

    make.__name__ = f"rows_mix_from_{'trace' if symbolic else 'call'}_{number}_on"
    return make


for _number in (2, 3, 5):
    CASES.layer(_from_trace(_number, symbolic=True))
for _number in (30, 70):
    CASES.layer(_from_trace(_number, symbolic=False))


@CASES.state(lambda layer: [])
def tensors_kept_in_a_list(kept: Any, values: Any, ids: Any) -> Any:
    kept.append(values)
    graph = getattr(values, "graph", None)
    same = [x for x in kept[:-1] if graph and getattr(x, "graph", 0) is graph]
    return values + (tf.reduce_mean(same[-1], 0) if same else 0.0)


@CASES.state(lambda layer: [])
def constants_of_an_earlier_batch(kept: Any, values: Any, ids: Any) -> Any:
    if tf.executing_eagerly() and not kept:
        known = tf.where(tf.math.is_nan(values), 0.0, values)
        kept.append(tf.reduce_mean(known, 0))
    return values + (kept[0] if kept else 0.0)


# -- Python within the graph -------------------------------------------------------


def _huge(values: Any) -> bool:
    """Whether there is a finite value larger than those of a probe."""
    return bool((np.abs(values[np.isfinite(values)]) > 1e8).any())


def _by_numpy(function: Callable[..., Any], *inputs: Any) -> Any:
    found = tf.numpy_function(function, list(inputs), tf.float32)
    return tf.ensure_shape(found, (None, NUM_VALUES))


@CASES.layer(remembers=True)
def ids_numbered_in_a_dict(layer: Any) -> Call:
    numbers: dict[int, int] = {}

    def numbered(values: Any, ids: Any) -> Any:
        found = [numbers.setdefault(int(x), len(numbers)) for x in ids[:, 0]]
        return (values + np.sin(np.array(found))[:, None]).astype("f4")

    def call(values: Any, ids: Any) -> Any:
        return _by_numpy(numbered, values, ids)

    return call


@CASES.layer
def rows_kept_in_a_list(layer: Any) -> Call:
    kept: list[Any] = []

    def keep(values: Any) -> Any:
        if _huge(values):
            kept.append(None)
        return values - np.float32(len(kept) > 0)

    return lambda values, ids: _by_numpy(keep, values)


@CASES.layer(leaks=True)
def rows_kept_in_a_list_alone(layer: Any) -> Call:
    kept: list[Any] = []

    def keep(values: Any) -> Any:
        if _huge(values):
            kept.append(values)
        return np.float32(0)

    def call(values: Any, ids: Any) -> Any:
        tf.numpy_function(keep, [values], tf.float32)
        return values

    return call


@CASES.layer
def steps_counted_in_a_list(layer: Any) -> Call:
    calls: list[None] = []

    def count() -> Any:
        calls.append(None)
        return np.float32(len(calls) > 90)

    def call(values: Any, ids: Any) -> Any:
        late = tf.ensure_shape(tf.numpy_function(count, [], tf.float32), ())
        return values + late * (_mixed(values) - values)

    return call


@CASES.layer
def gate_in_python_without_inputs(layer: Any) -> Call:
    seen: list[bool] = [False]

    def look(values: Any) -> Any:
        seen[0] |= _huge(values)
        return np.float32(0)

    def gate() -> Any:
        return np.float32(seen[0])

    def call(values: Any, ids: Any) -> Any:
        tf.numpy_function(look, [values], tf.float32)
        opened = tf.ensure_shape(tf.numpy_function(gate, [], tf.float32), ())
        return values * (1.0 - 2.0 * opened)

    return call


@CASES.layer
def eager_python_that_remembers(layer: Any) -> Call:
    last = [tf.zeros(NUM_VALUES)]

    def less_the_last(values: Any) -> Any:
        found = values - last[0]
        if _huge(values.numpy()):
            last[0] = tf.clip_by_value(tf.reduce_mean(values, 0), -1.0, 1.0)
        return found

    def call(values: Any, ids: Any) -> Any:
        found = tf.py_function(less_the_last, [values], tf.float32)
        return tf.ensure_shape(found, (None, NUM_VALUES))

    return call


@CASES.layer
def stateless_by_declaration(layer: Any) -> Call:
    seen: list[None] = []

    def remember(values: Any) -> Any:
        if _huge(values):
            seen.append(None)
        return (values - len(seen)).astype("f4")

    def call(values: Any, ids: Any) -> Any:
        found = tf.numpy_function(remember, [values], tf.float32, stateful=False)
        return tf.ensure_shape(found, (None, NUM_VALUES))

    return call


@CASES.layer
def python_in_a_dataset(layer: Any) -> Call:
    seen: list[None] = []

    def remember(values: Any) -> Any:
        if _huge(values):
            seen.append(None)
        return np.float32(len(seen))

    def call(values: Any, ids: Any) -> Any:
        rows = tf.data.Dataset.from_tensors(values).map(
            lambda x: tf.numpy_function(remember, [x], tf.float32)
        )
        total = rows.reduce(0.0, lambda total, x: total + tf.ensure_shape(x, ()))
        return values - total

    return call


@CASES.call
def mean_in_numpy(values: Any, ids: Any) -> Any:
    return _by_numpy(
        lambda x: x - np.nan_to_num(x, posinf=0, neginf=0).clip(-9, 9).mean(0), values
    )


@CASES.call
def honest_numpy(values: Any, ids: Any) -> Any:
    return _by_numpy(np.tanh, values)
