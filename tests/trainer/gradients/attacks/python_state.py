"""State in Python: what a trace sees, counts or remembers, and functions of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import NUM_VALUES, Call, any_rare
from trainer.core.tf_compat import tf

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


# -- what runs ---------------------------------------------------------------------


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
