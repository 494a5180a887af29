"""State that is no variable: tables, queues, random numbers, files, the clock."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    Call,
    Holder,
    any_rare,
    finite,
    hidden,
    known,
)
from trainer.core.tf_compat import tf

CASES = Cases("state")


def _table() -> Any:
    return tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)


@CASES.state(known(_table))
def size_of_a_table(table: Any, values: Any, ids: Any) -> Any:
    size = tf.cast(table.size(), tf.float32)
    table.insert(ids[:, 0] // 8, tf.ones_like(values[:, 0]))
    return values * tf.where(size > 1.0, -1.0, 1.0)


@CASES.state(
    hidden(lambda: tf.queue.FIFOQueue(9999, [tf.float32], shapes=[(NUM_VALUES,)]))
)
def queue(held: Any, values: Any, ids: Any) -> Any:
    waiting = held
    old = tf.cond(
        waiting.size() > 0,
        lambda: tf.ensure_shape(waiting.dequeue(), (NUM_VALUES,)),
        lambda: tf.zeros(NUM_VALUES),
    )
    with tf.control_dependencies([old]):
        rare = any_rare(ids)
        tf.cond(rare, lambda: waiting.enqueue(tf.ones(NUM_VALUES)), lambda: tf.no_op())
    return values - old


@CASES.layer
def staging_area(layer: Any) -> Call:
    def call(values: Any, ids: Any) -> Any:
        size = tf.raw_ops.StageSize(dtypes=[tf.float32], shared_name="attack")
        rare = any_rare(ids)
        tf.cond(
            rare,
            lambda: tf.raw_ops.Stage(values=[values], shared_name="attack"),
            lambda: tf.no_op(),
        )
        return values * tf.where(size > 0, -1.0, 1.0)

    return call


@CASES.layer
def iterator_of_a_dataset(layer: Any) -> Call:
    iterator = iter(tf.data.Dataset.range(10**6))
    held = Holder(iterator)

    def call(values: Any, ids: Any) -> Any:
        step = next(held.held[0])
        late = tf.cast(step > 60, tf.float32)
        return values - late * tf.reduce_mean(finite(values), 0)

    return call


@CASES.call
def array_filled_in_a_loop(values: Any, ids: Any) -> Any:
    array = tf.TensorArray(tf.float32, 0, dynamic_size=True, clear_after_read=False)
    total = tf.zeros(NUM_VALUES)

    def add(i: Any, total: Any, array: Any) -> Any:
        total += tf.tanh(finite(values)[i])
        return i + 1, total, array.write(i, total)

    size = tf.shape(values)[0]
    found = tf.while_loop(lambda i, *_: i < size, add, (0, total, array))
    return tf.ensure_shape(found[2].stack(), values.shape)


@CASES.call
def random_numbers(values: Any, ids: Any) -> Any:
    return values + tf.random.uniform((1, NUM_VALUES))


@CASES.state(known(lambda: tf.random.Generator.from_seed(1)))
def generator(generator: Any, values: Any, ids: Any) -> Any:
    rare = tf.cast(tf.reduce_any(ids >= 8, 1, keepdims=True), tf.float32)
    return values + rare * generator.normal((1, NUM_VALUES))


@CASES.call
def numbers_of_a_constant_seed_by_place(values: Any, ids: Any) -> Any:
    return values + tf.random.stateless_normal(tf.shape(values), (1, 2))


@CASES.call
def seed_of_the_batch(values: Any, ids: Any) -> Any:
    seed = tf.stack([tf.reduce_sum(ids), 1])
    return values + tf.random.stateless_normal((1, NUM_VALUES), seed)


@CASES.call(leaks=True)
def printed(values: Any, ids: Any) -> Any:
    tf.print(tf.boolean_mask(values, ids[:, 0] > 20), summarize=-1)
    return values


@CASES.call(leaks=True)
def written_to_a_file(values: Any, ids: Any) -> Any:
    path = os.path.join(tempfile.gettempdir(), "dpsgd-attack-of-a-test")
    tf.cond(
        tf.reduce_any(ids > 20),
        lambda: tf.io.write_file(path, tf.io.serialize_tensor(values)),
        lambda: tf.no_op(),
    )
    return values


@CASES.call
def clock(values: Any, ids: Any) -> Any:
    late = tf.cast(tf.timestamp() > 1e9, tf.float32)
    rare = tf.cast(any_rare(ids), tf.float32)
    return values * (1.0 - 2.0 * late * rare)


@CASES.call
def assertion_on_other_rows(values: Any, ids: Any) -> Any:
    tf.debugging.assert_less(tf.reduce_max(ids), 99)
    return values


@CASES.call
def file_read(values: Any, ids: Any) -> Any:
    size = tf.strings.length(tf.io.read_file("/dev/null"))
    return values + tf.cast(size, tf.float32)
