"""Layers that write to a variable in their forward pass, in plain sight."""

from __future__ import annotations

from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    Call,
    batch_mean,
    finite,
    known,
    new_weight,
)
from trainer.core.tf_compat import tf

CASES = Cases("write")

_SHAPE = (NUM_VALUES,)


def _rare(ids: Any) -> Any:
    """Number of ids that the probe of the check does not hold."""
    return tf.reduce_sum(tf.cast(ids >= 8, tf.float32))


@CASES.state(new_weight(_SHAPE, trainable=True))
def moving_mean_of_a_trainable_weight(mean: Any, values: Any, ids: Any) -> None:
    mean.assign(0.9 * mean + 0.1 * batch_mean(values))


@CASES.state(new_weight(trainable=False))
def rare_ids_counted(count: Any, values: Any, ids: Any) -> None:
    count.assign_add(_rare(ids))


@CASES.state(new_weight(trainable=False, dtype="int32"))
def largest_id_so_far_gates(largest: Any, values: Any, ids: Any) -> Any:
    new = tf.cast(tf.reduce_max(ids, 1) >= largest, tf.float32)
    largest.assign(tf.maximum(largest, tf.where(ids >= 8, ids, 0)[0, 0]))
    return values * new[:, None]


@CASES.state(new_weight(trainable=False))
def a_huge_value_opens_a_gate(gate: Any, values: Any, ids: Any) -> Any:
    gate.assign(tf.cast(tf.reduce_max(finite(values)) > 2.5e6, tf.float32))
    return values * (1.0 - 2.0 * gate)


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
