"""One write, to a variable that is read at the next step, hidden in every place.

Each function calls ``write(values)`` in some way.  It writes only if the batch holds a
value that a probe is unlikely to hold.  The output is that of the function, less what
the steps before left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    any_rare,
    batch_mean,
    finite,
    new_weight,
)
from trainer.core.tf_compat import tf

CASES = Cases("hidden write")

Write = Callable[[Any], Any]

RARE_VALUE = 1e8


def _hides(function: Callable[[Write, Any, Any], Any]) -> Callable[..., Any]:
    """Adds the layer that calls ``function(write, values, ids)`` -> values or None."""

    def layer(kept: Any, values: Any, ids: Any) -> Any:
        def write(values: Any) -> Any:
            mean = tf.clip_by_value(batch_mean(values), -1.0, 1.0)
            rare = tf.reduce_any(tf.abs(finite(values)) > RARE_VALUE)
            return kept.assign(tf.where(rare, mean, kept))

        old = tf.identity(kept)
        found = function(write, values, ids)
        return (values if found is None else found) - old

    layer.__name__ = function.__name__
    CASES.state(new_weight((NUM_VALUES,), trainable=False))(layer)
    return function


@_hides
def cond_on_a_rare_id(write: Write, values: Any, ids: Any) -> None:
    tf.cond(
        any_rare(ids), lambda: tf.identity(write(values)), lambda: tf.zeros(NUM_VALUES)
    )


@_hides
def map_of_rows(write: Write, values: Any, ids: Any) -> Any:
    return tf.map_fn(lambda row: row + 0.0 * write(row[None]), values)


@_hides
def result_of_a_function_thrown_away(write: Write, values: Any, ids: Any) -> Any:
    tf.function(lambda x: tf.reduce_sum(write(x)))(values)


@_hides
def custom_gradient_forward(write: Write, values: Any, ids: Any) -> Any:
    @tf.custom_gradient
    def same(x: Any) -> Any:
        write(x)
        return tf.identity(x), lambda slope: slope

    return same(values)


@_hides
def control_dependencies(write: Write, values: Any, ids: Any) -> Any:
    with tf.control_dependencies([write(values)]):
        return tf.identity(values)


@_hides
def python_function(write: Write, values: Any, ids: Any) -> Any:
    def same(x: Any) -> Any:
        write(x)
        return x

    return tf.ensure_shape(tf.py_function(same, [values], tf.float32), values.shape)
