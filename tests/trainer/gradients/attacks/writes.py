"""Layers that write to a variable in their forward pass, in plain sight."""

from __future__ import annotations

from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_IDS,
    NUM_VALUES,
    VOCABULARY,
    Call,
    batch_mean,
    layers,
    weight,
)
from trainer.tf_compat import keras, raw_variable, tf

CASES = Cases("write")

_SHAPE = (NUM_VALUES,)


def _rare(ids: Any) -> Any:
    """Number of ids that the probe of the check does not hold."""
    return tf.reduce_sum(tf.cast(ids >= 8, tf.float32))


class Holder:
    """Hides what it holds from Keras, which tracks attributes."""

    def __init__(self, *held: Any) -> None:
        self._read = lambda: held

    @property
    def held(self) -> Any:
        return self._read()


@CASES.layer
def moving_mean_of_a_trainable_weight(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=True)

    def call(values: Any, ids: Any) -> Any:
        mean.assign(0.9 * mean + 0.1 * batch_mean(values))
        return values

    return call


@CASES.layer
def moving_mean(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        mean.assign(0.9 * mean + 0.1 * batch_mean(values))
        return values

    return call


@CASES.layer
def raw_rows_in_a_trainable_weight(layer: Any) -> Call:
    seen = weight(layer, _SHAPE, trainable=True)

    def call(values: Any, ids: Any) -> Any:
        seen.assign(values[0])
        return values

    return call


@CASES.layer
def raw_rows_in_a_slice(layer: Any) -> Call:
    seen = weight(layer, (4, *_SHAPE), trainable=True)

    def call(values: Any, ids: Any) -> Any:
        seen[1].assign(values[-1])
        return values

    return call


@CASES.layer
def sum_added(layer: Any) -> Call:
    total = weight(layer, _SHAPE, trainable=True)

    def call(values: Any, ids: Any) -> Any:
        total.assign_add(batch_mean(values))
        return values

    return call


@CASES.layer
def sum_subtracted(layer: Any) -> Call:
    total = weight(layer, _SHAPE, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        total.value.assign_sub(batch_mean(values), read_value=False)
        return values

    return call


@CASES.layer
def ids_counted_by_scatter(layer: Any) -> Call:
    counts = weight(layer, (VOCABULARY,), trainable=True)

    def call(values: Any, ids: Any) -> Any:
        flat = tf.reshape(ids, (-1,))
        counts.value.scatter_add(tf.IndexedSlices(tf.ones_like(flat, tf.float32), flat))
        return values

    return call


@CASES.layer
def ids_marked_by_scatter_nd(layer: Any) -> Call:
    seen = weight(layer, (VOCABULARY,), trainable=False)

    def call(values: Any, ids: Any) -> Any:
        flat = tf.reshape(ids, (-1, 1))
        seen.value.scatter_nd_update(flat, tf.ones_like(flat[:, 0], tf.float32))
        return values

    return call


@CASES.layer
def largest_value_by_scatter_max(layer: Any) -> Call:
    largest = weight(layer, (VOCABULARY,), trainable=False)

    def call(values: Any, ids: Any) -> Any:
        largest.value.scatter_max(tf.IndexedSlices(values[:, 0], ids[:, 0]))
        return values

    return call


@CASES.layer
def rare_ids_counted(layer: Any) -> Call:
    count = weight(layer, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        count.assign_add(_rare(ids))
        return values

    return call


@CASES.layer
def rare_ids_counted_in_a_trainable_weight(layer: Any) -> Call:
    count = weight(layer, trainable=True)

    def call(values: Any, ids: Any) -> Any:
        count.assign_add(_rare(ids))
        return values

    return call


@CASES.layer
def huge_values_kept(layer: Any) -> Call:
    seen = weight(layer, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        finite = tf.where(tf.math.is_finite(values), values, 0.0)
        seen.assign_add(tf.reduce_sum(tf.nn.relu(tf.abs(finite) - 2e6)))
        return values

    return call


@CASES.layer
def missing_values_counted(layer: Any) -> Call:
    count = weight(layer, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        all_missing = tf.reduce_all(tf.math.is_nan(values), 1)
        count.assign_add(
            tf.reduce_sum(tf.cast(all_missing & (ids[:, 0] > 1), tf.float32))
        )
        return values

    return call


@CASES.layer
def largest_id_so_far_gates(layer: Any) -> Call:
    largest = weight(layer, trainable=False, dtype="int32")

    def call(values: Any, ids: Any) -> Any:
        new = tf.cast(tf.reduce_max(ids, 1) >= largest, tf.float32)
        largest.assign(tf.maximum(largest, tf.where(ids >= 8, ids, 0)[0, 0]))
        return values * new[:, None]

    return call


@CASES.layer
def a_huge_value_opens_a_gate(layer: Any) -> Call:
    gate = weight(layer, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        finite = tf.where(tf.math.is_finite(values), values, 0.0)
        gate.assign(tf.cast(tf.reduce_max(finite) > 2.5e6, tf.float32))
        return values * (1.0 - 2.0 * gate)

    return call


@CASES.layer
def a_rare_id_opens_a_gate_of_a_trainable_weight(layer: Any) -> Call:
    gate = weight(layer, trainable=True)

    def call(values: Any, ids: Any) -> Any:
        opened = tf.minimum(_rare(ids), 1.0)
        gate.assign(tf.where(opened > 0, 1.0 - 2.0 * opened, gate))
        return values + tf.stop_gradient(gate)

    return call


@CASES.layer
def ids_numbered_by_their_arrival(layer: Any) -> Call:
    numbers = weight(layer, (VOCABULARY,), trainable=False)
    last = weight(layer, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        new = tf.cast(ids[0, 0] >= 8, tf.float32)
        last.assign_add(new)
        numbers.value.scatter_add(tf.IndexedSlices(new[None] * last, ids[:1, 0]))
        return values * (1.0 + tf.gather(numbers, ids[:, :1]))

    return call


@CASES.layer
def mean_of_the_batch_before(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        old = tf.identity(mean)
        mean.assign(batch_mean(values))
        return values - old

    return call


@CASES.layer
def mean_written_and_read(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        return values - mean.assign(batch_mean(values))

    return call


@CASES.layer
def steps_counted(layer: Any) -> Call:
    count = weight(layer, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        count.assign_add(1.0)
        return values

    return call


@CASES.layer
def rows_mix_from_the_third_step_on(layer: Any) -> Call:
    count = weight(layer, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        late = tf.cast(count.assign_add(1.0) > 40.0, tf.float32)
        return values - late * batch_mean(values)

    return call


@CASES.layer
def variable_that_keras_does_not_know(layer: Any) -> Call:
    hidden = Holder(tf.Variable(tf.zeros(_SHAPE)))

    def call(values: Any, ids: Any) -> Any:
        (mean,) = hidden.held
        old = tf.identity(mean)
        mean.assign(batch_mean(values))
        return values - old

    return call


@CASES.layer
def variable_of_tensorflow(layer: Any) -> Call:
    layer.state = tf.Variable(tf.zeros(_SHAPE))

    def call(values: Any, ids: Any) -> Any:
        layer.state.assign(batch_mean(values))
        return values

    return call


@CASES.layer
def variables_in_a_list_and_a_dict(layer: Any) -> Call:
    layer.states = [{"mean": tf.Variable(tf.zeros(_SHAPE), trainable=False)}]

    def call(values: Any, ids: Any) -> Any:
        layer.states[0]["mean"].assign(batch_mean(values))
        return values

    return call


class _Nested(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tf.Module()
        self.inner.mean = tf.Variable(tf.zeros(_SHAPE))

    def __call__(self, values: Any) -> Any:
        self.inner.mean.assign(batch_mean(values))
        return values


@CASES.layer
def nested_modules(layer: Any) -> Call:
    layer.module = _Nested()
    return lambda values, ids: layer.module(values)


@CASES.layer
def kernel_of_a_layer_inside(layer: Any) -> Call:
    layer.dense = layers.Dense(NUM_VALUES)

    def call(values: Any, ids: Any) -> Any:
        found = layer.dense(values)
        layer.dense.bias.assign(batch_mean(values))
        return found

    return call


@CASES.layer
def table_of_a_layer_inside(layer: Any) -> Call:
    layer.table = layers.Embedding(VOCABULARY, 2)
    layer.table.build((None, NUM_IDS))
    table = raw_variable(layer.table.embeddings)

    def call(values: Any, ids: Any) -> Any:
        rows = tf.reshape(layer.table(ids), (-1, 2 * NUM_IDS))
        table.scatter_update(tf.IndexedSlices(values[:, :2], ids[:, 0]))
        return values + rows[:, :NUM_VALUES]

    return call


@CASES.layer
def raw_assign(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=True)

    def call(values: Any, ids: Any) -> Any:
        tf.raw_ops.AssignVariableOp(resource=mean.handle, value=batch_mean(values))
        return values

    return call


@CASES.layer
def raw_scatter(layer: Any) -> Call:
    table = weight(layer, (VOCABULARY, NUM_VALUES), trainable=True)

    def call(values: Any, ids: Any) -> Any:
        tf.raw_ops.ResourceScatterUpdate(
            resource=table.handle, indices=ids[:, 0], updates=values
        )
        return values

    return call


@CASES.layer
def raw_gradient_descent(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=True)

    def call(values: Any, ids: Any) -> Any:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=mean.handle, alpha=1.0, delta=batch_mean(values)
        )
        return values

    return call


@CASES.layer
def raw_counter(layer: Any) -> Call:
    count = weight(layer, trainable=False, dtype="int64")

    def call(values: Any, ids: Any) -> Any:
        tf.raw_ops.ResourceCountUpTo(resource=count.handle, limit=1 << 40, T=tf.int64)
        return values

    return call


@CASES.layer
def raw_handle(layer: Any) -> Call:
    def handle() -> Any:
        return tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=_SHAPE, shared_name="hidden_by_an_attack"
        )

    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=handle(), value=tf.zeros(_SHAPE))

    def call(values: Any, ids: Any) -> Any:
        old = tf.raw_ops.ReadVariableOp(resource=handle(), dtype=tf.float32)
        with tf.control_dependencies([old]):
            tf.raw_ops.AssignVariableOp(resource=handle(), value=batch_mean(values))
        return values - old

    return call


@CASES.layer
def handle_kept_in_a_dict(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=False)
    hidden = Holder(mean.handle)

    def call(values: Any, ids: Any) -> Any:
        tf.raw_ops.AssignAddVariableOp(
            resource=hidden.held[0], value=batch_mean(values)
        )
        return values

    return call


@CASES.layer
def assign_of_tensorflow_1(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=True)

    def call(values: Any, ids: Any) -> Any:
        tf.compat.v1.assign(mean.value, batch_mean(values))
        return values

    return call


@CASES.layer
def optimizer_within_the_layer(layer: Any) -> Call:
    mean = weight(layer, _SHAPE, trainable=True)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([mean])
    hidden = Holder(optimizer)

    def call(values: Any, ids: Any) -> Any:
        hidden.held[0].apply_gradients([(batch_mean(values), mean)])
        return values

    return call


@CASES.layer
def text_kept(layer: Any) -> Call:
    layer.text = tf.Variable("", trainable=False)

    def call(values: Any, ids: Any) -> Any:
        layer.text.assign(tf.strings.as_string(values[0, 0]))
        return values

    return call


@CASES.layer
def two_variables_exchanged(layer: Any) -> Call:
    first = weight(layer, _SHAPE, trainable=False)
    second = weight(layer, _SHAPE, trainable=False)

    def call(values: Any, ids: Any) -> Any:
        old = tf.identity(first)
        first.assign(second)
        second.assign(batch_mean(values))
        return values - old

    return call
