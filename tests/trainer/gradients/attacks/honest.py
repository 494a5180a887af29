"""Layers that look like attacks and are none: they must be accepted."""

from __future__ import annotations

from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    Call,
    hidden,
    new_weight,
    tamed,
)
from trainer.core.tf_compat import tf

#: Each row by itself, by operations without state.
CASES = Cases("honest", honest=True)
#: The same in substance, but a check may refuse what it does not understand.
NEIGHBOURS = Cases("neighbour")


_OF_ROWS = {
    "same": lambda v, ids: v,
    "layer norm by hand": lambda v, ids: (
        (v - tf.reduce_mean(v, 1, keepdims=True))
        / (1.0 + tf.math.reduce_std(v, 1, keepdims=True))
    ),
    "sorted row": lambda v, ids: tf.sort(v, 1),
    "rolled row": lambda v, ids: tf.roll(v, 1, 1),
    "clip by norm of a row": lambda v, ids: tf.clip_by_norm(v, 1.0, axes=[1]),
    "in top k": lambda v, ids: (
        v * tf.cast(tf.math.in_top_k(ids[:, 0] % NUM_VALUES, v, 3), tf.float32)[:, None]
    ),
    "gather by its own ids": lambda v, ids: (
        v + tf.gather(v, ids[:, :1] % NUM_VALUES, batch_dims=1)
    ),
    "transpose and back": lambda v, ids: tf.transpose(tf.tanh(tf.transpose(v))),
    "rare value of the row": lambda v, ids: tf.where(ids[:, :1] >= 8, -v, v),
    "repeat and take": lambda v, ids: tf.repeat(v, 2, axis=0)[::2],
    "stop gradient": lambda v, ids: v * tf.stop_gradient(v),
}
for _name, _function in _OF_ROWS.items():

    def _call(values: Any, ids: Any, function: Any = _function) -> Any:
        return tf.ensure_shape(function(tamed(values), ids), values.shape)

    _call.__name__ = _name
    CASES.call(_call)


@CASES.state(hidden(lambda: tf.Variable(0.5, trainable=False)))
def variable_that_is_read(scale: Any, values: Any, ids: Any) -> Any:
    return values * scale


#: Read by a case, and known to others.
SHARED = tf.Variable(0.0, trainable=False)


@CASES.call
def variable_of_the_module(values: Any, ids: Any) -> Any:
    return tamed(values) + SHARED


@CASES.state(new_weight((NUM_VALUES,), trainable=True))
def weights_of_its_own(scale: Any, values: Any, ids: Any) -> Any:
    return tamed(values) * (1.0 + scale)


@CASES.state(new_weight((NUM_VALUES,), trainable=False))
def frozen_weights(scale: Any, values: Any, ids: Any) -> Any:
    return tamed(values) * (1.0 + scale)


@NEIGHBOURS.layer
def constant_table(layer: Any) -> Call:
    made = tf.lookup.KeyValueTensorInitializer(tf.range(16), tf.linspace(-1.0, 1.0, 16))
    layer.table = tf.lookup.StaticHashTable(made, 0.0)
    return lambda values, ids: (
        values + tf.ensure_shape(layer.table.lookup(ids[:, :1]), (None, 1))
    )


@NEIGHBOURS.call
def inner_function(values: Any, ids: Any) -> Any:
    return tf.function(lambda x: tf.tanh(x) * 2.0)(tamed(values))


@NEIGHBOURS.call
def map_of_rows(values: Any, ids: Any) -> Any:
    return tf.map_fn(lambda row: row - tf.reduce_mean(row), tamed(values))


@NEIGHBOURS.call
def checked_numbers(values: Any, ids: Any) -> Any:
    return tf.debugging.check_numerics(tamed(values), "not finite")
