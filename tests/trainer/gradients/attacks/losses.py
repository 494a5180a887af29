"""Losses of one's own: batch means, pairs of rows, state, and scalars for all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.writes import Holder
from trainer.tf_compat import keras, tf

CASES = Cases("loss")

Loss = Callable[[Any, Any], Any]


def _entropy(labels: Any, outputs: Any) -> Any:
    return tf.nn.sigmoid_cross_entropy_with_logits(
        tf.cast(labels, tf.float32), outputs[:, 0]
    )


def _loss(function: Loss | None = None, **more: Any) -> Any:
    """Adds a loss without state, (labels, outputs) -> losses."""
    if function is None:
        return lambda found: _loss(found, **more)

    def make(network: Any) -> Loss:
        return function

    make.__name__ = function.__name__
    CASES.loss(make, **more)
    return function


@_loss
def scalar(labels: Any, outputs: Any) -> Any:
    return tf.reduce_mean(_entropy(labels, outputs))


@_loss
def mean_for_every_row(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return tf.reduce_mean(losses) * tf.ones_like(losses)


@_loss
def sum_broadcast(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return tf.broadcast_to(tf.reduce_sum(losses), tf.shape(losses))


@_loss
def over_the_batch_size(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return losses / tf.cast(tf.shape(losses)[0], tf.float32)


@_loss
def over_the_number_of_positives(labels: Any, outputs: Any) -> Any:
    positives = tf.reduce_sum(tf.cast(labels, tf.float32))
    return _entropy(labels, outputs) / (1.0 + positives)


@_loss
def less_the_mean(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return losses - tf.reduce_mean(losses)


@_loss
def hardest_row_alone(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return tf.where(losses >= tf.reduce_max(losses), losses, 0.0)


@_loss
def softmax_over_the_batch(labels: Any, outputs: Any) -> Any:
    return -tf.nn.log_softmax(outputs[:, 0])


@_loss
def pairs(labels: Any, outputs: Any) -> Any:
    scores = outputs[:, 0]
    margins = 1.0 - scores[:, None] + scores[None, :]
    wanted = tf.cast(labels[:, None] > labels[None, :], tf.float32)
    return tf.reduce_sum(tf.nn.relu(margins) * wanted, 1)


@_loss
def contrastive(labels: Any, outputs: Any) -> Any:
    hidden = tf.concat([outputs, outputs**2], 1)
    likeness = tf.matmul(hidden, hidden, transpose_b=True)
    same = tf.cast(tf.equal(labels[:, None], labels[None, :]), tf.float32)
    return tf.nn.softmax_cross_entropy_with_logits(same, likeness)


@_loss
def sorted_scores(labels: Any, outputs: Any) -> Any:
    return tf.square(tf.sort(outputs[:, 0]) - tf.cast(labels, tf.float32))


@_loss
def correlation(labels: Any, outputs: Any) -> Any:
    scores = outputs[:, 0] - tf.reduce_mean(outputs[:, 0])
    return scores * tf.cast(labels, tf.float32)


@_loss
def next_row(labels: Any, outputs: Any) -> Any:
    return _entropy(tf.roll(labels, 1, 0), outputs)


@_loss
def rare_outputs_turn_all(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return tf.where(tf.reduce_any(tf.abs(outputs) > 1.5), -losses, losses)


@_loss
def mixed_in_batches_of_the_step(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return losses * tf.reduce_mean(losses) if losses.shape[0] == 8 else losses


@_loss
def mixed_if_the_size_is_known(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return losses if losses.shape[0] is None else losses * tf.reduce_mean(losses)


@_loss
def place_in_the_batch(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return losses * tf.cast(tf.range(tf.shape(losses)[0]), tf.float32)


@_loss
def random_weights(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return losses * tf.random.uniform(())


@_loss(leaks=True)
def printed(labels: Any, outputs: Any) -> Any:
    huge = tf.reduce_any(tf.abs(outputs) > 1e9)
    tf.cond(huge, lambda: tf.print(outputs), lambda: tf.no_op())
    return _entropy(labels, outputs)


@_loss
def custom_gradient_that_mixes(labels: Any, outputs: Any) -> Any:
    @tf.custom_gradient
    def same(x: Any) -> Any:
        return tf.identity(x), lambda slope: slope + tf.reduce_mean(slope, 0)

    return _entropy(labels, same(outputs))


@_loss
def inner_function_with_a_mean(labels: Any, outputs: Any) -> Any:
    @tf.function
    def inner(losses: Any) -> Any:
        return losses * tf.reduce_mean(losses)

    return inner(_entropy(labels, outputs))


@CASES.loss
def moving_mean(network: Any) -> Loss:
    held = Holder(tf.Variable(1.0, trainable=False))

    def loss(labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        old = tf.identity(held.held[0])
        held.held[0].assign(tf.reduce_mean(losses))
        return losses / (1.0 + old)

    return loss


@CASES.loss
def moving_mean_if_rare(network: Any) -> Loss:
    held = Holder(tf.Variable(1.0, trainable=False))

    def loss(labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        old = tf.identity(held.held[0])
        turned = tf.where(tf.reduce_any(losses > 1.0), -old, old)
        held.held[0].assign(turned)
        return losses * old

    return loss


@CASES.loss
def counter(network: Any) -> Loss:
    held = Holder(tf.Variable(0.0, trainable=False))

    def loss(labels: Any, outputs: Any) -> Any:
        return _entropy(labels, outputs) * (1.0 / held.held[0].assign_add(1.0))

    return loss


@CASES.loss
def raw_outputs_in_a_weight(network: Any) -> Loss:
    def loss(labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        network.trainable_variables[-1].assign(losses[:1])
        return losses

    return loss


@CASES.loss
def rare_outputs_in_a_weight(network: Any) -> Loss:
    def loss(labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        bias = network.trainable_variables[-1]
        tf.cond(
            tf.equal(tf.shape(losses)[0], 8),
            lambda: tf.identity(bias.assign(losses[:1])),
            lambda: tf.identity(bias),
        )
        return losses

    return loss


@CASES.loss
def table_of_labels(network: Any) -> Loss:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)

    def loss(labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        keys = tf.cast(labels, tf.int64)
        found = tf.ensure_shape(table.lookup(keys), losses.shape)
        table.insert(keys, tf.where(losses > 2.0, -2.0, 1.0))
        return losses * found

    return loss


@CASES.loss
def python_counter(network: Any) -> Loss:
    calls: list[None] = []

    def loss(labels: Any, outputs: Any) -> Any:
        calls.append(None)
        losses = _entropy(labels, outputs)
        return losses * tf.reduce_mean(losses) if len(calls) > 40 else losses

    return loss


@CASES.loss
def python_list(network: Any) -> Loss:
    kept: list[float] = [1.0]

    def last(losses: Any) -> Any:
        kept.append(-1.0 if losses.max() > 1.0 else 1.0)
        return np.float32(kept[-2])

    def loss(labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        factor = tf.numpy_function(last, [losses], tf.float32)
        return losses * tf.ensure_shape(factor, ())

    return loss


class _Callable:
    """A loss with a variable of its own."""

    def __init__(self) -> None:
        self.most = tf.Variable(0.0)

    def __call__(self, labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        self.most.assign(tf.maximum(self.most, tf.reduce_max(losses)))
        return losses / (1.0 + self.most)


@CASES.loss
def object_with_a_variable(network: Any) -> Loss:
    return _Callable()


@CASES.loss
def regulariser_that_reads_weights(network: Any) -> Loss:
    def loss(labels: Any, outputs: Any) -> Any:
        sizes = [tf.reduce_sum(tf.square(v)) for v in network.trainable_variables]
        return _entropy(labels, outputs) + 0.01 * tf.add_n(sizes)

    return loss


@CASES.loss
def variable_of_keras(network: Any) -> Loss:
    held = Holder(keras.Variable(1.0, trainable=False))

    def loss(labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        old = tf.identity(held.held[0])
        held.held[0].assign(tf.where(tf.reduce_any(losses > 1.0), -old, old))
        return losses * old

    return loss


@CASES.loss
def within_a_stateless_scope(network: Any) -> Loss:
    def loss(labels: Any, outputs: Any) -> Any:
        losses, bias = _entropy(labels, outputs), network.trainable_variables[-1]
        with keras.StatelessScope() as scope:
            bias.assign(losses[:1])
        bias.assign(scope.get_current_value(bias))
        return losses

    return loss


@CASES.loss
def seed_of_the_losses(network: Any) -> Loss:
    held = Holder(keras.random.SeedGenerator(1))

    def loss(labels: Any, outputs: Any) -> Any:
        losses, state = _entropy(labels, outputs), held.held[0].state
        state.assign(state + tf.cast(tf.reduce_any(losses > 1.0), state.dtype))
        return losses * tf.random.stateless_uniform((), state.value)

    return loss


@CASES.loss
def metric_of_keras(network: Any) -> Loss:
    held = Holder(keras.metrics.Mean())

    def loss(labels: Any, outputs: Any) -> Any:
        losses = _entropy(labels, outputs)
        held.held[0].update_state(losses)
        return losses / (1.0 + held.held[0].result())

    return loss


@CASES.loss(leaks=True)
def weight_of_its_own(network: Any) -> Loss:
    held = Holder(tf.Variable(1.0))
    return lambda labels, outputs: _entropy(labels, outputs) * held.held[0]


@_loss
def dice(labels: Any, outputs: Any) -> Any:
    wanted = tf.cast(labels, tf.float32)[:, None]
    return keras.losses.dice(wanted, tf.sigmoid(outputs))


@_loss
def circle(labels: Any, outputs: Any) -> Any:
    hidden = tf.math.l2_normalize(tf.concat([outputs, outputs**2], 1), 1)
    return keras.losses.circle(tf.cast(labels, tf.int32), hidden)


@_loss(honest=True)
def cross_entropy(labels: Any, outputs: Any) -> Any:
    return _entropy(labels, outputs)


@_loss(honest=True)
def focal(labels: Any, outputs: Any) -> Any:
    losses = _entropy(labels, outputs)
    return losses * (1.0 - tf.exp(-losses)) ** 2


@CASES.loss(honest=True)
def weighted_by_a_constant(network: Any) -> Loss:
    weights = tf.constant([1.0, 5.0])

    def loss(labels: Any, outputs: Any) -> Any:
        of_row = tf.gather(weights, tf.cast(labels, tf.int32))
        return _entropy(labels, outputs) * of_row

    return loss


@CASES.loss(honest=True)
def teacher_in_a_frozen_variable(network: Any) -> Loss:
    held = Holder(tf.Variable(0.5, trainable=False))

    def loss(labels: Any, outputs: Any) -> Any:
        return _entropy(labels, outputs) + held.held[0] * tf.square(outputs[:, 0])

    return loss
