"""Gradients of one's own that mix rows, write, or only look as if they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    Call,
    any_rare,
    finite,
    new_weight,
    weight,
)
from trainer.core.tf_compat import tf

CASES = Cases("gradient")


def _with_slope(
    slope_of: Callable[[Any, Any, Any], Any], name: str, **more: Any
) -> None:
    """Adds a layer whose slope is ``slope_of(slope, values, ids)``."""

    def make(layer: Any) -> Call:
        scale = weight(layer, (NUM_VALUES,), trainable=True)

        def call(values: Any, ids: Any) -> Any:
            @tf.custom_gradient
            def same(x: Any) -> Any:
                return tf.identity(x), lambda slope: slope_of(
                    slope, finite(values), ids
                )

            return same(tf.tanh(finite(values)) * scale)

        return call

    make.__name__ = name
    CASES.layer(make, **more)


_SLOPES = {
    "less the mean": lambda s, v, ids: s - tf.reduce_mean(s, 0),
    "times the batch size": lambda s, v, ids: s * tf.cast(tf.shape(s)[0], tf.float32),
    "clipped globally": lambda s, v, ids: tf.clip_by_global_norm([s], 0.1)[0][0],
    "plus rows if rare": lambda s, v, ids: tf.where(
        any_rare(ids), s + tf.reduce_sum(tf.tanh(v), 0), s
    ),
    "of a known number of rows": lambda s, v, ids: (
        s if s.shape[0] is None else s + tf.reduce_sum(s, 0)
    ),
    "random": lambda s, v, ids: s * tf.random.uniform((1, NUM_VALUES)),
}
for _name, _slope in _SLOPES.items():
    _with_slope(_slope, _name)

# Honest: each row by itself.
_with_slope(lambda s, v, ids: s, "the same", honest=True)
_with_slope(lambda s, v, ids: -s, "reversed in sign", honest=True)
_with_slope(lambda s, v, ids: 1e6 * s, "enlarged", honest=True)
_with_slope(lambda s, v, ids: tf.clip_by_value(s, -0.1, 0.1), "clipped", honest=True)


def _writes_backward(rare: bool) -> Callable[[Any], Call]:
    def make(layer: Any) -> Call:
        scale = weight(layer, (NUM_VALUES,), trainable=True)
        kept = weight(layer, (NUM_VALUES,), trainable=False)

        def call(values: Any, ids: Any) -> Any:
            old = tf.identity(kept)
            tame = tf.tanh(finite(values))

            @tf.custom_gradient
            def same(x: Any) -> Any:
                def gradient(slope: Any) -> Any:
                    new = tf.reduce_mean(tame, 0)
                    kept.assign(tf.where(any_rare(ids), new, kept) if rare else new)
                    return slope

                return tf.identity(x), gradient

            return same(tame * scale) - old

        return call

    make.__name__ = "writes backward if rare" if rare else "writes backward"
    return make


CASES.layer(_writes_backward(rare=False))
CASES.layer(_writes_backward(rare=True))


@CASES.state(new_weight((NUM_VALUES,), trainable=True))
def recomputed_with_a_mean(scale: Any, values: Any, ids: Any) -> Any:
    def less_mean(x: Any) -> Any:
        return tf.tanh(x) * scale - tf.reduce_mean(tf.tanh(x), 0)

    return tf.recompute_grad(less_mean)(finite(values))


@CASES.state(new_weight((NUM_VALUES,), trainable=True))
def straight_through(scale: Any, values: Any, ids: Any) -> Any:
    hidden = tf.tanh(finite(values)) * (1.0 + scale)
    return hidden + tf.stop_gradient(tf.round(hidden) - hidden)
