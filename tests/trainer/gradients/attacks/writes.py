"""Layers that write to a variable in their forward pass, in plain sight."""

from __future__ import annotations

from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_IDS,
    NUM_VALUES,
    VOCABULARY,
    Call,
    Holder,
    batch_mean,
    finite,
    hidden,
    known,
    layers,
    new_weight,
    weight,
)
from trainer.tf_compat import keras, tf

CASES = Cases("write")

_SHAPE = (NUM_VALUES,)


def _rare(ids: Any) -> Any:
    """Number of ids that the probe of the check does not hold."""
    return tf.reduce_sum(tf.cast(ids >= 8, tf.float32))


@CASES.state(new_weight(_SHAPE, trainable=True))
def moving_mean_of_a_trainable_weight(mean: Any, values: Any, ids: Any) -> None:
    mean.assign(0.9 * mean + 0.1 * batch_mean(values))


@CASES.state(new_weight((4, *_SHAPE), trainable=True))
def raw_rows_in_a_slice(seen: Any, values: Any, ids: Any) -> None:
    seen[1].assign(values[-1])


@CASES.state(new_weight(_SHAPE, trainable=False))
def sum_subtracted(total: Any, values: Any, ids: Any) -> None:
    total.value.assign_sub(batch_mean(values), read_value=False)


@CASES.state(new_weight((VOCABULARY,), trainable=True))
def ids_counted_by_scatter(counts: Any, values: Any, ids: Any) -> None:
    flat = tf.reshape(ids, (-1,))
    counts.value.scatter_add(tf.IndexedSlices(tf.ones_like(flat, tf.float32), flat))


@CASES.state(new_weight((VOCABULARY,), trainable=False))
def ids_marked_by_scatter_nd(seen: Any, values: Any, ids: Any) -> None:
    flat = tf.reshape(ids, (-1, 1))
    seen.value.scatter_nd_update(flat, tf.ones_like(flat[:, 0], tf.float32))


@CASES.state(new_weight((VOCABULARY,), trainable=False))
def largest_value_by_scatter_max(largest: Any, values: Any, ids: Any) -> None:
    largest.value.scatter_max(tf.IndexedSlices(values[:, 0], ids[:, 0]))


@CASES.state(new_weight(trainable=False))
def rare_ids_counted(count: Any, values: Any, ids: Any) -> None:
    count.assign_add(_rare(ids))


@CASES.state(new_weight(trainable=False))
def huge_values_kept(seen: Any, values: Any, ids: Any) -> None:
    seen.assign_add(tf.reduce_sum(tf.nn.relu(tf.abs(finite(values)) - 2e6)))


@CASES.state(new_weight(trainable=False))
def missing_values_counted(count: Any, values: Any, ids: Any) -> None:
    all_missing = tf.reduce_all(tf.math.is_nan(values), 1)
    count.assign_add(tf.reduce_sum(tf.cast(all_missing & (ids[:, 0] > 1), tf.float32)))


@CASES.state(new_weight(trainable=False, dtype="int32"))
def largest_id_so_far_gates(largest: Any, values: Any, ids: Any) -> Any:
    new = tf.cast(tf.reduce_max(ids, 1) >= largest, tf.float32)
    largest.assign(tf.maximum(largest, tf.where(ids >= 8, ids, 0)[0, 0]))
    return values * new[:, None]


@CASES.state(new_weight(trainable=False))
def a_huge_value_opens_a_gate(gate: Any, values: Any, ids: Any) -> Any:
    gate.assign(tf.cast(tf.reduce_max(finite(values)) > 2.5e6, tf.float32))
    return values * (1.0 - 2.0 * gate)


@CASES.state(new_weight(trainable=True))
def a_rare_id_opens_a_gate_of_a_trainable_weight(
    gate: Any, values: Any, ids: Any
) -> Any:
    opened = tf.minimum(_rare(ids), 1.0)
    gate.assign(tf.where(opened > 0, 1.0 - 2.0 * opened, gate))
    return values + tf.stop_gradient(gate)


@CASES.state(
    lambda layer: [weight(layer, s, trainable=False) for s in ((VOCABULARY,), ())]
)
def ids_numbered_by_their_arrival(state: Any, values: Any, ids: Any) -> Any:
    numbers, last = state
    new = tf.cast(ids[0, 0] >= 8, tf.float32)
    last.assign_add(new)
    numbers.value.scatter_add(tf.IndexedSlices(new[None] * last, ids[:1, 0]))
    return values * (1.0 + tf.gather(numbers, ids[:, :1]))


@CASES.state(new_weight(_SHAPE, trainable=False))
def mean_written_and_read(mean: Any, values: Any, ids: Any) -> Any:
    return values - mean.assign(batch_mean(values))


@CASES.state(new_weight(trainable=False))
def steps_counted(count: Any, values: Any, ids: Any) -> None:
    count.assign_add(1.0)


@CASES.state(new_weight(trainable=False))
def rows_mix_from_the_third_step_on(count: Any, values: Any, ids: Any) -> Any:
    late = tf.cast(count.assign_add(1.0) > 40.0, tf.float32)
    return values - late * batch_mean(values)


@CASES.state(hidden(lambda: tf.Variable(tf.zeros(_SHAPE))))
def variable_that_keras_does_not_know(mean: Any, values: Any, ids: Any) -> Any:
    old = tf.identity(mean)
    mean.assign(batch_mean(values))
    return values - old


@CASES.state(known(lambda: tf.Variable(tf.zeros(_SHAPE))))
def variable_of_tensorflow(state: Any, values: Any, ids: Any) -> None:
    state.assign(batch_mean(values))


class _Nested(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tf.Module()
        self.inner.mean = tf.Variable(tf.zeros(_SHAPE))

    def __call__(self, values: Any) -> Any:
        self.inner.mean.assign(batch_mean(values))
        return values


@CASES.state(known(_Nested))
def nested_modules(module: Any, values: Any, ids: Any) -> Any:
    return module(values)


@CASES.state(known(lambda: layers.Dense(NUM_VALUES)))
def kernel_of_a_layer_inside(dense: Any, values: Any, ids: Any) -> Any:
    found = dense(values)
    dense.bias.assign(batch_mean(values))
    return found


def _table() -> Any:
    table = layers.Embedding(VOCABULARY, 2)
    table.build((None, NUM_IDS))
    return table


@CASES.state(known(_table))
def table_of_a_layer_inside(table: Any, values: Any, ids: Any) -> Any:
    rows = tf.reshape(table(ids), (-1, 2 * NUM_IDS))
    new = tf.IndexedSlices(values[:, :2], ids[:, 0])
    # Its ``value`` is symbolic while Keras infers shapes.
    table.embeddings._value.scatter_update(new)
    return values + rows[:, :NUM_VALUES]


@CASES.state(new_weight(_SHAPE, trainable=True))
def raw_assign(mean: Any, values: Any, ids: Any) -> None:
    tf.raw_ops.AssignVariableOp(resource=mean.handle, value=batch_mean(values))


@CASES.state(new_weight((VOCABULARY, NUM_VALUES), trainable=True))
def raw_scatter(table: Any, values: Any, ids: Any) -> None:
    tf.raw_ops.ResourceScatterUpdate(
        resource=table.handle, indices=ids[:, 0], updates=values
    )


@CASES.state(new_weight(_SHAPE, trainable=True))
def raw_gradient_descent(mean: Any, values: Any, ids: Any) -> None:
    tf.raw_ops.ResourceApplyGradientDescent(
        var=mean.handle, alpha=1.0, delta=batch_mean(values)
    )


@CASES.state(new_weight(trainable=False, dtype="int64"))
def raw_counter(count: Any, values: Any, ids: Any) -> None:
    tf.raw_ops.ResourceCountUpTo(resource=count.handle, limit=1 << 40, T=tf.int64)


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


@CASES.state(lambda layer: Holder(weight(layer, _SHAPE, trainable=False).handle))
def handle_kept_in_a_dict(handle: Any, values: Any, ids: Any) -> None:
    tf.raw_ops.AssignAddVariableOp(resource=handle, value=batch_mean(values))


@CASES.state(new_weight(_SHAPE, trainable=True))
def assign_of_tensorflow_1(mean: Any, values: Any, ids: Any) -> None:
    tf.compat.v1.assign(mean.value, batch_mean(values))


def _optimizer(layer: Any) -> Holder:
    mean, optimizer = weight(layer, _SHAPE, trainable=True), keras.optimizers.SGD(1.0)
    optimizer.build([mean])
    return Holder(optimizer, mean)


@CASES.state(_optimizer)
def optimizer_within_the_layer(hidden: Any, values: Any, ids: Any) -> None:
    optimizer, mean = hidden.held
    optimizer.apply_gradients([(batch_mean(values), mean)])


@CASES.state(known(lambda: tf.Variable("", trainable=False)))
def text_kept(text: Any, values: Any, ids: Any) -> None:
    text.assign(tf.strings.as_string(values[0, 0]))


@CASES.state(lambda layer: [weight(layer, _SHAPE, trainable=False) for _ in range(2)])
def two_variables_exchanged(state: Any, values: Any, ids: Any) -> Any:
    first, second = state
    old = tf.identity(first)
    first.assign(second)
    second.assign(batch_mean(values))
    return values - old
