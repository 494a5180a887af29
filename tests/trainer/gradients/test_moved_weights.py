"""Weights that a step moves, and the rows of tables that a model reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.trainer.architectures import ARCHITECTURES
from tests.trainer.bounded import bam_sum
from tests.trainer.claims.test_bam import loop_sum
from tests.trainer.zoo import NUM_ROWS, arrays, assert_close, batch, make_model, numbers
from trainer.claims import bam
from trainer.core.tf_compat import keras, tf
from trainer.gradients.backward_pass import backward
from trainer.gradients.paths import ONE_PASS as PATH
from trainer.gradients.paths import SINGLE_EXAMPLES, choose_path
from trainer.gradients.proof import obstacle, proof_of, table_reads
from trainer.gradients.weight_uses import UnknownUseError
from trainer.model.trainable_model import TrainableModel

CLIP = 0.3
RADIUS = 0.3


#: Together, every way to use a weight.
ONES = (
    "convolution_of_clips", "deep_interest", "llama_block", "mobile_blocks",
    "opacus_char_lstm", "stacked_gru", "tf_privacy_mnist", "untracked_table",
)  # fmt: skip
PLAIN = ("deep_interest", "opacus_char_lstm", "tf_privacy_mnist")


def _sum(model: TrainableModel, clip: float = CLIP) -> Callable[..., Any]:
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
    found = _sum(model)(*batch(data, padding=4, fill=math.nan))
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


def _model(*, second: bool = False, from_weights: bool = False) -> TrainableModel:
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
    reads = table_reads(_model(second=True))
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
    model = _model(from_weights=True)
    if kind == "no table":
        integers = keras.Input((13,), name="integers")
        network = keras.Model(integers, keras.layers.Dense(1)(integers))
        model = TrainableModel(network=network, description={})
    assert obstacle(model) is None
    assert table_reads(model) is None
