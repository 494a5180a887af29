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
from trainer.tf_compat import tf

CASES = Cases("hidden write")

Write = Callable[[Any], Any]

RARE_VALUE = 1e8


def hides(
    cases: Cases,
) -> Callable[[Callable[[Write, Any, Any], Any]], Callable[..., Any]]:
    """Adds the layer that calls ``function(write, values, ids)`` -> values or None."""

    def add(function: Callable[[Write, Any, Any], Any]) -> Callable[..., Any]:
        def layer(kept: Any, values: Any, ids: Any) -> Any:
            def write(values: Any) -> Any:
                mean = tf.clip_by_value(batch_mean(values), -1.0, 1.0)
                rare = tf.reduce_any(tf.abs(finite(values)) > RARE_VALUE)
                return kept.assign(tf.where(rare, mean, kept))

            old = tf.identity(kept)
            found = function(write, values, ids)
            return (values if found is None else found) - old

        layer.__name__ = function.__name__
        cases.state(new_weight((NUM_VALUES,), trainable=False))(layer)
        return function

    return add


_hides = hides(CASES)


def _branches(write: Write, values: Any) -> tuple[Callable[[], Any], ...]:
    """Returns a branch that writes, and one that does not."""
    return lambda: tf.identity(write(values)), lambda: tf.zeros(NUM_VALUES)


#: Name -> (values, ids) -> whether the write is executed.
_CONDITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "cond": lambda values, ids: tf.reduce_sum(ids) >= 0,
    "cond on a rare id": lambda values, ids: any_rare(ids),
    "cond on a huge value": lambda values, ids: tf.reduce_any(
        tf.abs(finite(values)) > RARE_VALUE
    ),
    "cond on the batch size": lambda values, ids: tf.equal(tf.shape(values)[0], 8),
}


def _on_condition(name: str, condition: Callable[[Any, Any], Any]) -> None:
    def cond(write: Write, values: Any, ids: Any) -> None:
        tf.cond(condition(values, ids), *_branches(write, values))

    cond.__name__ = name
    _hides(cond)


for _name, _condition in _CONDITIONS.items():
    _on_condition(_name, _condition)


@_hides
def branch_of_autograph(write: Write, values: Any, ids: Any) -> Any:
    @tf.function
    def branch(x: Any) -> Any:
        if any_rare(ids):
            write(x)
        return x

    return branch(values)


@_hides
def loop_of_autograph(write: Write, values: Any, ids: Any) -> Any:
    @tf.function
    def loop(x: Any) -> Any:
        for _ in tf.range(2):
            write(x)
        return x

    return loop(values)


@_hides
def switch_case(write: Write, values: Any, ids: Any) -> Any:
    branches = _branches(write, values)
    tf.switch_case(tf.minimum(tf.reduce_max(ids) // 8, 1), list(branches[::-1]))


@_hides
def while_body(write: Write, values: Any, ids: Any) -> Any:
    def body(i: Any) -> Any:
        write(values)
        return [i + 1]

    tf.while_loop(lambda i: i < 1, body, [tf.constant(0)])


@_hides
def while_condition(write: Write, values: Any, ids: Any) -> Any:
    def more(i: Any) -> Any:
        written = write(values)
        return tf.logical_and(i < 1, tf.reduce_sum(written) < 1e30)

    tf.while_loop(more, lambda i: [i + 1], [tf.constant(0)])


#: How (write of a row -> row) is called for every row.
_OVER_ROWS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "map of rows": lambda of_row, values: tf.map_fn(of_row, values),
    "vectorized map": lambda of_row, values: tf.vectorized_map(of_row, values),
    "scan": lambda of_row, values: tf.scan(
        lambda _, row: of_row(row), values, initializer=tf.zeros(NUM_VALUES)
    ),
    "fold": lambda of_row, values: tf.foldl(
        lambda last, row: (of_row(row), last)[1], values, initializer=tf.zeros(())
    ),
    "dataset": lambda of_row, values: tf.data.Dataset.from_tensor_slices(values).reduce(
        0.0, lambda total, row: total + tf.reduce_sum(of_row(row))
    ),
}


def over_rows(
    hide: Callable[..., Any], name: str, apply: Callable[[Any, Any], Any]
) -> None:
    """Adds a layer that writes for every row.

    Args:
      hide: What ``hides`` returned.
      name: Name of the case.
      apply: (function of a row, values) -> one value for each row, or else.
    """

    def layer(write: Write, values: Any, ids: Any) -> Any:
        def of_row(row: Any) -> Any:
            write(row[None])
            return row

        found = apply(of_row, values)
        return found if found.shape.rank == 2 else None

    layer.__name__ = name
    hide(layer)


for _name, _apply in _OVER_ROWS.items():
    over_rows(_hides, _name, _apply)


@_hides
def inner_function(write: Write, values: Any, ids: Any) -> Any:
    @tf.function
    def inner(x: Any) -> Any:
        write(x)
        return x

    return inner(values)


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
def recomputed_gradient(write: Write, values: Any, ids: Any) -> Any:
    def same(x: Any) -> Any:
        write(x)
        return tf.identity(x)

    return tf.recompute_grad(same)(values)


@_hides
def control_dependencies(write: Write, values: Any, ids: Any) -> Any:
    with tf.control_dependencies([write(values)]):
        return tf.identity(values)


@_hides
def gradient_tape(write: Write, values: Any, ids: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(values)
        write(values)
        total = tf.reduce_sum(values)
    return values * tape.gradient(total, values)


@_hides
def python_function(write: Write, values: Any, ids: Any) -> Any:
    def same(x: Any) -> Any:
        write(x)
        return x

    return tf.ensure_shape(tf.py_function(same, [values], tf.float32), values.shape)


@_hides
def numpy_function(write: Write, values: Any, ids: Any) -> Any:
    def none(x: Any) -> Any:
        write(tf.constant(x))
        return x

    tf.numpy_function(none, [values], tf.float32)


@_hides
def name_scope_and_device(write: Write, values: Any, ids: Any) -> Any:
    with tf.name_scope("gradients"), tf.device("/cpu:0"):
        write(values)


@_hides
def without_autograph(write: Write, values: Any, ids: Any) -> Any:
    return tf.autograph.experimental.do_not_convert(
        lambda x: tf.cond(
            any_rare(ids),
            lambda: x + 0.0 * tf.reduce_sum(write(x)),
            lambda: x,
        )
    )(values)
