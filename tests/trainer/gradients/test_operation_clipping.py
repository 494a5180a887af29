"""Operations that use a weight, moved or not: exact, bounded, or not chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.architectures import ARCHITECTURES
from tests.trainer.bounded import bam_sum
from tests.trainer.claims.test_bam import loop_sum
from tests.trainer.zoo import (
    NUM_ROWS,
    arrays,
    assert_close,
    batch,
    make_model,
    naive_sum,
    numbers,
)
from trainer.claims import bam
from trainer.core.tf_compat import keras, tf
from trainer.gradients import gradient_parts
from trainer.gradients.backward_pass import backward
from trainer.gradients.gradient_parts import TableRows
from trainer.gradients.paths import ONE_PASS as PATH
from trainer.gradients.paths import SINGLE_EXAMPLES, choose_path, clipped_sum
from trainer.gradients.proof import obstacle, proof_of, table_reads
from trainer.gradients.weight_uses import UnknownUseError
from trainer.model.losses import loss_of_ones_own
from trainer.model.trainable_model import TrainableModel

CLIP = 0.3
MOST = 1.001


class _Weight(keras.layers.Layer):
    """A layer that applies a function to its inputs and one weight."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._use = use
        self.w = self.add_weight(shape, initializer="ones")

    def call(self, values: Any) -> Any:
        return self._use(values, self.w)


def known_model(
    shape: tuple[int, ...], use: Callable[[Any, Any], Any]
) -> TrainableModel:
    def make() -> Any:
        integers, values = numbers()
        return keras.Model(integers, _Weight(shape, use)(values))

    return make_model(make)


def _whole_and_part(v: Any, w: Any) -> Any:
    first, _ = tf.split(w, [1, 12])
    return tf.matmul(v, w) + v[:, :1] * first


def _two_reshapes(v: Any, w: Any) -> Any:
    return tf.matmul(v, w) + tf.matmul(v, tf.transpose(tf.reshape(w, (1, 13))))


def _parts(v: Any, w: Any) -> Any:
    first, second = tf.split(w, [3, 10])
    return tf.matmul(v[:, :3], first) - tf.matmul(v[:, 3:], second)


def _sizes_decide(v: Any, w: Any) -> Any:
    total = tf.reduce_sum(v, 1, keepdims=True)
    return total * (w if v.shape[0] is None else tf.exp(w))


#: Uses of a weight that are known.
KNOWN: dict[str, tuple[tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "disjoint parts": ((13, 1), _parts),
    "turned": ((1, 13), lambda v, w: tf.matmul(v, w, transpose_b=True)),
    "negated": ((13, 1), lambda v, w: tf.matmul(v, -w)),
    "subtracted from": ((1,), lambda v, w: tf.tanh(w - v)[:, :1]),
    "one for all": ((), lambda v, w: tf.reduce_sum(tf.tanh(w * v), 1, keepdims=True)),
    "one row for all": ((1, 13), lambda v, w: tf.tanh(w * v + w)[:, :1]),
    "rows and columns": (
        (13, 1),
        lambda v, w: (
            tf.matmul(v, w)
            + tf.reduce_sum(tf.gather(w, tf.cast(v[:, :2] > 0, tf.int32)), 1)
        ),
    ),
    "einsum": ((13, 2), lambda v, w: tf.einsum("bi,ij->bj", v, w)[:, :1]),
    "einsum along": (
        (13,),
        lambda v, w: tf.reduce_sum(tf.einsum("bi,i->bi", v, w), 1, keepdims=True),
    ),
}

#: Uses that are not known, and words of the reason.
UNKNOWN: dict[str, tuple[tuple[int, ...], Callable[[Any, Any], Any], str]] = {
    "whole and part": ((13, 1), _whole_and_part, "two ways"),
    "two reshapes": ((13, 1), _two_reshapes, "two ways"),
    "exponential": ((1,), lambda v, w: v[:, :1] * tf.exp(w), "changes a weight"),
    "with itself": ((13, 1), lambda v, w: tf.matmul(v, w * w), "changes a weight"),
    "a row twice": (
        (3, 1),
        lambda v, w: tf.matmul(v[:, :2], tf.gather(w, [1, 1])),
        "reads a row twice",
    ),
    "divisor": ((1,), lambda v, w: v[:, :1] / (3.0 + w), "changes a weight"),
    "quotient": ((1,), lambda v, w: v[:, :1] / w, "unknown way"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_uses_have_the_clipped_sum_of_a_tape_per_example(
    name: str, rows: Any
) -> None:
    """Seen to fail where a formed gradient was left out of the norm."""
    model, data = known_model(*KNOWN[name]), rows(NUM_ROWS)
    assert obstacle(model) is None
    found = clipped_sum(model, l2_norm_clip=CLIP, path=PATH)(*batch(data, padding=2))
    assert_close(arrays(found), naive_sum(model, data, CLIP))


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_uses_are_computed_one_row_at_a_time(name: str) -> None:
    shape, use, why = UNKNOWN[name]
    model = known_model(shape, use)
    assert why in (obstacle(model) or "")
    assert choose_path(model) == SINGLE_EXAMPLES


def test_the_graph_that_runs_is_the_one_that_was_proven(rows: Any) -> None:
    """A layer that looks for the batch size gets the same graph in every step."""
    model, data = known_model((1,), _sizes_decide), rows(NUM_ROWS)
    assert choose_path(model) == PATH
    found = clipped_sum(model, l2_norm_clip=CLIP)(*batch(data))
    plain = known_model((1,), lambda v, w: tf.reduce_sum(v, 1, keepdims=True) * w)
    assert_close(arrays(found), naive_sum(plain, data, CLIP))


@pytest.mark.parametrize(
    "name",
    [
        "tf_privacy_mnist",
        pytest.param("mobile_blocks", marks=pytest.mark.thorough),
        pytest.param("text_transformer", marks=pytest.mark.thorough),
    ],
)
def test_chunks_and_capped_coordinates_equal_a_loop_over_examples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_parts, "_MOST_HELD_VALUES", 100)
    model, data = ARCHITECTURES[name].plain(), ARCHITECTURES[name].rows(NUM_ROWS)
    cap = CLIP / 4
    gradient_sum = clipped_sum(model, l2_norm_clip=CLIP, linf_norm_clip=cap)
    found = gradient_sum(*batch(data, padding=3, fill=math.nan))
    assert_close(arrays(found), naive_sum(model, data, CLIP, cap))


def test_too_many_time_steps_are_refused_with_a_remedy() -> None:
    def make() -> Any:
        integers, values = numbers()
        steps = keras.ops.tile(values[:, :, None], (1, 40, 1))
        return keras.Model(integers, keras.layers.SimpleRNN(1)(steps))

    model = make_model(make)
    with pytest.raises(InputError, match=r"at most 512 time steps.*520\. Shorten"):
        clipped_sum(model, l2_norm_clip=CLIP)


def test_an_id_out_of_range_is_not_that_of_another_example() -> None:
    ids = np.tile(np.arange(7, dtype=np.int32), (3, 10))  # too many to compare in pairs
    ids[1, :2], ids[2, 0] = [-1, 7], 8  # 6 of the first row, 0 and 1 of others
    slopes = tf.random.stateless_normal((3, 70, 2), (1, 2))
    together = TableRows(tf.constant(ids), slopes, (7, 2)).squared_norm()
    for row in range(3):
        alone = TableRows(tf.constant(ids[[row]]), slopes[row : row + 1], (7, 2))
        np.testing.assert_allclose(together[row], alone.squared_norm()[0], 1e-5)


class _Read(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        values, ids = inputs
        return tf.gather(values, ids, batch_dims=1)


def test_a_value_of_a_row_out_of_range_is_not_that_of_another_example() -> None:
    """By a loss that is linear: TensorFlow reads no value, so that none is an error."""
    values = keras.Input((4,), name="values")
    ids = keras.Input((2,), dtype="int32", name="ids")
    read = _Read()([keras.layers.Dense(2)(values), ids])
    network = keras.Model([values, ids], read)

    def loss(labels: Any, outputs: Any) -> Any:
        return tf.reduce_sum(outputs, 1) * tf.cast(labels, tf.float32)

    model = TrainableModel(
        network=network, description={}, loss=loss_of_ones_own("sum", loss)
    )
    step = tf.function(clipped_sum(model, l2_norm_clip=CLIP), autograph=False)

    def of_row(ids: list[int], label: int) -> np.ndarray:
        columns = {
            "values": tf.ones((3, 4)),
            "ids": tf.constant([[1, 1], ids, [1, 1]]),
            "label": tf.constant([1, label, 1], tf.int8),
        }
        return np.concatenate([np.ravel(x) for x in step(columns, tf.ones(3))])

    # Of the row before, -1 is the last value.
    moved = np.linalg.norm(of_row([1, 1], 1) - of_row([-1, 1], -100))
    assert moved <= 2 * MOST * CLIP


# -- weights that a step moves, and the rows of tables that a model reads --------------


RADIUS = 0.3


#: Together, every way to use a weight.
ONES = (
    "convolution_of_clips", "deep_interest", "llama_block", "mobile_blocks",
    "opacus_char_lstm", "stacked_gru", "tf_privacy_mnist", "untracked_table",
)  # fmt: skip
PLAIN = ("deep_interest", "tf_privacy_mnist")


def _moved_sum(model: TrainableModel, clip: float = CLIP) -> Callable[..., Any]:
    moved_sum = bam_sum(model, l2_norm_clip=clip, radius=RADIUS, path=PATH)
    return tf.function(moved_sum, autograph=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in PLAIN else pytest.mark.thorough)
        for name in ONES
    ],
)
def test_one_pass_equals_a_loop_that_moves_the_weights(name: str) -> None:
    model, data = ARCHITECTURES[name].plain(), ARCHITECTURES[name].rows(NUM_ROWS)
    found = _moved_sum(model)(*batch(data, padding=4, fill=math.nan))
    assert_close(arrays(found), loop_sum(model, data, CLIP, RADIUS), 2e-5)


class _ChosenRows(keras.layers.Layer):
    """Reads rows of a table that another weight chooses."""

    def build(self, shape: Any) -> None:
        self.choice = self.add_weight((13, 3))
        self.table = self.add_weight((3, 2))

    def call(self, values: Any) -> Any:
        scores = tf.matmul(values, self.choice)
        rows = tf.gather(self.table, tf.argmax(scores, 1, output_type=tf.int32))
        return tf.reduce_sum(rows, 1, keepdims=True) * tf.reduce_max(
            scores, 1, keepdims=True
        )


def test_rows_that_are_chosen_by_weights_are_computed_one_example_at_a_time(
    rows: Any,
) -> None:
    def make() -> Any:
        integers, values = numbers()
        return keras.Model(integers, _ChosenRows()(values))

    model, data = make_model(make), rows(NUM_ROWS)
    assert choose_path(model) == PATH
    assert bam.choose_bam_path(model) == SINGLE_EXAMPLES
    proof = proof_of(model)

    @tf.function(autograph=False)
    def moved(columns: Any, weight: Any) -> Any:
        found = backward(proof, columns, NUM_ROWS)
        with pytest.raises(UnknownUseError, match="depend on a weight"):
            found.moved(weight)
        return weight

    moved(*batch(data))
    chosen = bam_sum(model, l2_norm_clip=CLIP, radius=RADIUS)
    assert_close(arrays(chosen(*batch(data))), loop_sum(model, data, CLIP, RADIUS))


def _reader(*, second: bool = False, from_weights: bool = False) -> TrainableModel:
    ids = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Embedding(11, 2)(ids + 3)
    if second:
        others = keras.layers.Embedding(5, 2)(ids[:, :2] // 2)
        values = keras.layers.Concatenate(1)([values, others])
    logit = keras.layers.Dense(1)(keras.layers.Flatten()(values))
    if from_weights:
        chosen = keras.ops.cast(logit[:, 0] > 0, "int32")
        logit = logit + keras.layers.Embedding(2, 1)(chosen)
    return TrainableModel(network=keras.Model(ids, logit), description={})


def test_ids_are_those_that_the_tables_are_read_at_padding_included(rows: Any) -> None:
    data = rows(4)
    columns = {name: tf.constant(data[name]) for name in data.dtype.names}
    reads = table_reads(_reader(second=True))
    assert reads is not None
    assert reads.num_ids == (26, 2)
    assert [table.shape[0] for table in reads.tables] == [11, 5]
    first, second = reads.ids(columns, tf.constant([1.0, 1.0, 0.0, 1.0]))
    wanted = np.zeros((16, 26), np.int32)  # as many rows as a step computes
    wanted[[0, 1, 3]] = data["categories"][[0, 1, 3]]
    np.testing.assert_array_equal(first, wanted.reshape(-1) + 3)
    np.testing.assert_array_equal(second, wanted[:, :2].reshape(-1) // 2)


@pytest.mark.parametrize("kind", ["no table", "from weights"])
def test_no_reads_where_they_are_not_known_beforehand(kind: str) -> None:
    model = _reader(from_weights=True)
    if kind == "no table":
        integers = keras.Input((13,), name="integers")
        network = keras.Model(integers, keras.layers.Dense(1)(integers))
        model = TrainableModel(network=network, description={})
    assert obstacle(model) is None
    assert table_reads(model) is None
