"""Losses of one's own: batch means, pairs of rows, state, and scalars for all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import Holder
from trainer.core.tf_compat import keras, tf

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
    "over the batch size": lambda x, y, z: x / tf.cast(tf.shape(x)[0], tf.float32),
    "softmax over the batch": lambda x, y, z: -tf.nn.log_softmax(z[:, 0]),
    "mixed in batches of the step": lambda x, y, z: (
        x * tf.reduce_mean(x) if x.shape[0] == 8 else x
    ),
    "random weights": lambda x, y, z: x * tf.random.uniform(()),
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


# -- with state --------------------------------------------------------------------


@_with(lambda network: tf.Variable(1.0, trainable=False))
def moving_mean_if_rare(sign: Any, losses: Any) -> Any:
    old = tf.identity(sign)
    sign.assign(tf.where(tf.reduce_any(losses > 1.0), -old, old))
    return losses * old


@_with(lambda network: network.trainable_variables[-1])
def rare_outputs_in_a_weight(bias: Any, losses: Any) -> Any:
    tf.cond(
        tf.equal(tf.shape(losses)[0], 8),
        lambda: tf.identity(bias.assign(losses[:1])),
        lambda: tf.identity(bias),
    )
    return losses


@_with(lambda network: [1.0])
def python_list(kept: list[float], losses: Any) -> Any:
    def last(losses: Any) -> Any:
        kept.append(-1.0 if losses.max() > 1.0 else 1.0)
        return np.float32(kept[-2])

    factor = tf.numpy_function(last, [losses], tf.float32)
    return losses * tf.ensure_shape(factor, ())


@CASES.loss(honest=True)
def teacher_in_a_frozen_variable(network: Any) -> Loss:
    scale = Holder(tf.Variable(0.5, trainable=False))
    return lambda labels, outputs: (
        _entropy(labels, outputs) + scale.held[0] * tf.square(outputs[:, 0])
    )
