"""Losses of one's own: batch means, pairs of rows, state, and scalars for all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import Holder
from trainer.tf_compat import keras, tf

CASES = Cases("loss")

Loss = Callable[[Any, Any], Any]


def _entropy(labels: Any, outputs: Any) -> Any:
    return tf.nn.sigmoid_cross_entropy_with_logits(
        tf.cast(labels, tf.float32), outputs[:, 0]
    )


def _loss(function: Any = None, *, name: str | None = None, **more: Any) -> Any:
    """Adds a loss without state, (labels, outputs) -> losses."""
    if function is None:
        return lambda found: _loss(found, name=name, **more)

    def make(network: Any) -> Loss:
        return function  # type: ignore[no-any-return]

    make.__name__ = name or function.__name__
    CASES.loss(make, **more)
    return function


def _with(make: Callable[[Any], Any], **more: Any) -> Any:
    """Adds a loss with state, which ``make`` makes of the network.

    The function that is decorated is (state, cross-entropies) -> losses.
    """

    def add(function: Callable[[Any, Any], Any]) -> Any:
        def loss(network: Any) -> Loss:
            hidden = Holder(make(network))
            return lambda labels, outputs: function(
                hidden.held[0], _entropy(labels, outputs)
            )

        loss.__name__ = function.__name__
        CASES.loss(loss, **more)
        return function

    return add


#: (cross-entropies, labels, outputs) -> losses.
_MIXED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scalar": lambda x, y, z: tf.reduce_mean(x),
    "mean for every row": lambda x, y, z: tf.reduce_mean(x) * tf.ones_like(x),
    "over the batch size": lambda x, y, z: x / tf.cast(tf.shape(x)[0], tf.float32),
    "over the number of positives": lambda x, y, z: (
        x / (1.0 + tf.reduce_sum(tf.cast(y, tf.float32)))
    ),
    "hardest row alone": lambda x, y, z: tf.where(x >= tf.reduce_max(x), x, 0.0),
    "softmax over the batch": lambda x, y, z: -tf.nn.log_softmax(z[:, 0]),
    "next row": lambda x, y, z: _entropy(tf.roll(y, 1, 0), z),
    "rare outputs turn all": lambda x, y, z: tf.where(
        tf.reduce_any(tf.abs(z) > 1.5), -x, x
    ),
    "mixed in batches of the step": lambda x, y, z: (
        x * tf.reduce_mean(x) if x.shape[0] == 8 else x
    ),
    "mixed if the size is known": lambda x, y, z: (
        x if x.shape[0] is None else x * tf.reduce_mean(x)
    ),
    "place in the batch": lambda x, y, z: (
        x * tf.cast(tf.range(tf.shape(x)[0]), tf.float32)
    ),
    "random weights": lambda x, y, z: x * tf.random.uniform(()),
    "inner function with a mean": lambda x, y, z: tf.function(
        lambda losses: losses * tf.reduce_mean(losses)
    )(x),
    "dice": lambda x, y, z: keras.losses.dice(
        tf.cast(y, tf.float32)[:, None], tf.sigmoid(z)
    ),
}
_HONEST: dict[str, Callable[[Any, Any, Any], Any]] = {
    "cross entropy": lambda x, y, z: x,
    "focal": lambda x, y, z: x * (1.0 - tf.exp(-x)) ** 2,
    "weighted by a constant": lambda x, y, z: (
        x * tf.gather(tf.constant([1.0, 5.0]), tf.cast(y, tf.int32))
    ),
}


def _of_entropies(function: Callable[[Any, Any, Any], Any]) -> Loss:
    return lambda labels, outputs: function(_entropy(labels, outputs), labels, outputs)


for _names, _more in ((_MIXED, {}), (_HONEST, {"honest": True})):
    for _name, _function in _names.items():
        _loss(_of_entropies(_function), name=_name, **_more)


@_loss
def pairs(labels: Any, outputs: Any) -> Any:
    scores = outputs[:, 0]
    margins = 1.0 - scores[:, None] + scores[None, :]
    wanted = tf.cast(labels[:, None] > labels[None, :], tf.float32)
    return tf.reduce_sum(tf.nn.relu(margins) * wanted, 1)


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


# -- with state --------------------------------------------------------------------


@_with(lambda network: tf.Variable(1.0, trainable=False))
def moving_mean(last: Any, losses: Any) -> Any:
    old = tf.identity(last)
    last.assign(tf.reduce_mean(losses))
    return losses / (1.0 + old)


@_with(lambda network: tf.Variable(1.0, trainable=False))
def moving_mean_if_rare(sign: Any, losses: Any) -> Any:
    old = tf.identity(sign)
    sign.assign(tf.where(tf.reduce_any(losses > 1.0), -old, old))
    return losses * old


@_with(lambda network: tf.Variable(0.0, trainable=False))
def counter(count: Any, losses: Any) -> Any:
    return losses * (1.0 / count.assign_add(1.0))


@_with(lambda network: network.trainable_variables[-1])
def raw_outputs_in_a_weight(bias: Any, losses: Any) -> Any:
    bias.assign(losses[:1])
    return losses


@_with(lambda network: network.trainable_variables[-1])
def rare_outputs_in_a_weight(bias: Any, losses: Any) -> Any:
    tf.cond(
        tf.equal(tf.shape(losses)[0], 8),
        lambda: tf.identity(bias.assign(losses[:1])),
        lambda: tf.identity(bias),
    )
    return losses


@_with(lambda network: network.trainable_variables[-1])
def within_a_stateless_scope(bias: Any, losses: Any) -> Any:
    with keras.StatelessScope() as scope:
        bias.assign(losses[:1])
    bias.assign(scope.get_current_value(bias))
    return losses


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


@_with(lambda network: [])
def python_counter(calls: list[None], losses: Any) -> Any:
    calls.append(None)
    return losses * tf.reduce_mean(losses) if len(calls) > 40 else losses


@_with(lambda network: [1.0])
def python_list(kept: list[float], losses: Any) -> Any:
    def last(losses: Any) -> Any:
        kept.append(-1.0 if losses.max() > 1.0 else 1.0)
        return np.float32(kept[-2])

    factor = tf.numpy_function(last, [losses], tf.float32)
    return losses * tf.ensure_shape(factor, ())


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


@_with(lambda network: network)
def regulariser_that_reads_weights(network: Any, losses: Any) -> Any:
    sizes = [tf.reduce_sum(tf.square(v)) for v in network.trainable_variables]
    return losses + 0.01 * tf.add_n(sizes)


@_with(lambda network: keras.random.SeedGenerator(1))
def seed_of_the_losses(seeds: Any, losses: Any) -> Any:
    state = seeds.state
    state.assign(state + tf.cast(tf.reduce_any(losses > 1.0), state.dtype))
    return losses * tf.random.stateless_uniform((), state.value)


@_with(lambda network: keras.metrics.Mean())
def metric_of_keras(metric: Any, losses: Any) -> Any:
    metric.update_state(losses)
    return losses / (1.0 + metric.result())


@_with(lambda network: tf.Variable(1.0), leaks=True)
def weight_of_its_own(scale: Any, losses: Any) -> Any:
    return losses * scale


@CASES.loss(honest=True)
def teacher_in_a_frozen_variable(network: Any) -> Loss:
    scale = Holder(tf.Variable(0.5, trainable=False))
    return lambda labels, outputs: (
        _entropy(labels, outputs) + scale.held[0] * tf.square(outputs[:, 0])
    )
