"""State that is no variable: tables, queues, random numbers, files, the clock."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    any_rare,
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


@CASES.call
def random_numbers(values: Any, ids: Any) -> Any:
    return values + tf.random.uniform((1, NUM_VALUES))


@CASES.state(known(lambda: tf.random.Generator.from_seed(1)))
def generator(generator: Any, values: Any, ids: Any) -> Any:
    rare = tf.cast(tf.reduce_any(ids >= 8, 1, keepdims=True), tf.float32)
    return values + rare * generator.normal((1, NUM_VALUES))


@CASES.call(leaks=True)
def written_to_a_file(values: Any, ids: Any) -> Any:
    path = os.path.join(tempfile.gettempdir(), "dpsgd-attack-of-a-test")
    tf.cond(
        tf.reduce_any(ids > 20),
        lambda: tf.io.write_file(path, tf.io.serialize_tensor(values)),
        lambda: tf.no_op(),
    )
    return values
