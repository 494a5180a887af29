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
    Call,
    finite,
    weight,
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
        def make(layer: Any) -> Call:
            kept = weight(layer, (NUM_VALUES,), trainable=False)

            def write(values: Any) -> Any:
                mean = tf.clip_by_value(tf.reduce_mean(finite(values), 0), -1.0, 1.0)
                rare = tf.reduce_any(tf.abs(finite(values)) > RARE_VALUE)
                return kept.assign(tf.where(rare, mean, kept))

            def call(values: Any, ids: Any) -> Any:
                old = tf.identity(kept)
                found = function(write, values, ids)
                return (values if found is None else found) - old

            return call

        make.__name__ = function.__name__
        cases.layer(make)
        return function

    return add


_hides = hides(CASES)


@_hides
def cond(write: Write, values: Any, ids: Any) -> Any:
    tf.cond(
        tf.reduce_sum(ids) >= 0,
        lambda: tf.identity(write(values)),
        lambda: tf.zeros(NUM_VALUES),
    )


@_hides
def cond_on_a_rare_id(write: Write, values: Any, ids: Any) -> Any:
    tf.cond(
        tf.reduce_any(ids >= 8),
        lambda: tf.identity(write(values)),
        lambda: tf.zeros(NUM_VALUES),
    )


@_hides
def cond_on_a_huge_value(write: Write, values: Any, ids: Any) -> Any:
    tf.cond(
        tf.reduce_any(tf.abs(finite(values)) > RARE_VALUE),
        lambda: tf.identity(write(values)),
        lambda: tf.zeros(NUM_VALUES),
    )


@_hides
def cond_on_the_batch_size(write: Write, values: Any, ids: Any) -> Any:
    tf.cond(
        tf.equal(tf.shape(values)[0], 8),
        lambda: tf.identity(write(values)),
        lambda: tf.zeros(NUM_VALUES),
    )


@_hides
def branch_of_autograph(write: Write, values: Any, ids: Any) -> Any:
    @tf.function
    def branch(x: Any) -> Any:
        if tf.reduce_any(ids >= 8):
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
def case(write: Write, values: Any, ids: Any) -> Any:
    tf.case(
        [(tf.reduce_any(ids >= 8), lambda: tf.identity(write(values)))],
        default=lambda: tf.zeros(NUM_VALUES),
    )


@_hides
def switch_case(write: Write, values: Any, ids: Any) -> Any:
    tf.switch_case(
        tf.minimum(tf.reduce_max(ids) // 8, 1),
        [lambda: tf.zeros(NUM_VALUES), lambda: tf.identity(write(values))],
    )


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


@_hides
def cond_within_a_loop(write: Write, values: Any, ids: Any) -> Any:
    def body(i: Any) -> Any:
        tf.cond(
            tf.reduce_any(ids >= 8),
            lambda: tf.identity(write(values)),
            lambda: tf.zeros(NUM_VALUES),
        )
        return [i + 1]

    tf.while_loop(lambda i: i < 1, body, [tf.constant(0)])


@_hides
def map_of_rows(write: Write, values: Any, ids: Any) -> Any:
    def of_row(row: Any) -> Any:
        write(row[None])
        return row

    return tf.map_fn(of_row, values)


@_hides
def vectorized_map(write: Write, values: Any, ids: Any) -> Any:
    def of_row(row: Any) -> Any:
        write(row[None])
        return row

    return tf.vectorized_map(of_row, values)


@_hides
def scan(write: Write, values: Any, ids: Any) -> Any:
    def of_row(_: Any, row: Any) -> Any:
        write(row[None])
        return row

    return tf.scan(of_row, values, initializer=tf.zeros(NUM_VALUES))


@_hides
def fold(write: Write, values: Any, ids: Any) -> Any:
    def of_row(last: Any, row: Any) -> Any:
        write(row[None])
        return last

    tf.foldl(of_row, values, initializer=tf.zeros(()))


@_hides
def inner_function(write: Write, values: Any, ids: Any) -> Any:
    @tf.function
    def inner(x: Any) -> Any:
        write(x)
        return x

    return inner(values)


@_hides
def function_within_a_function(write: Write, values: Any, ids: Any) -> Any:
    @tf.function
    def inner(x: Any) -> Any:
        if tf.reduce_any(ids >= 8):
            write(x)
        return x * 1.0

    return tf.function(lambda x: inner(x) * 1.0)(values)


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
def grouped(write: Write, values: Any, ids: Any) -> Any:
    with tf.control_dependencies([tf.group(write(values), tf.no_op())]):
        return tf.identity(values)


@_hides
def gradient_tape(write: Write, values: Any, ids: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(values)
        write(values)
        total = tf.reduce_sum(values)
    return values * tape.gradient(total, values)


@_hides
def stop_gradient(write: Write, values: Any, ids: Any) -> Any:
    written = tf.stop_gradient(write(values))
    return values + 0.0 * tf.reduce_sum(written)


@_hides
def python_function(write: Write, values: Any, ids: Any) -> Any:
    def same(x: Any) -> Any:
        write(x)
        return x

    return tf.ensure_shape(tf.py_function(same, [values], tf.float32), values.shape)


@_hides
def python_function_thrown_away(write: Write, values: Any, ids: Any) -> Any:
    def none(x: Any) -> Any:
        write(x)
        return tf.zeros(())

    tf.py_function(none, [values], tf.float32)


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
def dataset(write: Write, values: Any, ids: Any) -> Any:
    def add(total: Any, row: Any) -> Any:
        write(row[None])
        return total + tf.reduce_sum(row)

    tf.data.Dataset.from_tensor_slices(values).reduce(0.0, add)


@_hides
def without_autograph(write: Write, values: Any, ids: Any) -> Any:
    return tf.autograph.experimental.do_not_convert(
        lambda x: tf.cond(
            tf.reduce_any(ids >= 8),
            lambda: x + 0.0 * tf.reduce_sum(write(x)),
            lambda: x,
        )
    )(values)
