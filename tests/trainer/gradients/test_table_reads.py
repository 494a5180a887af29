"""The rows that a model reads of its tables are known before any weight is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.core.tf_compat import keras, tf
from trainer.gradients.engine.proof import obstacle, table_reads
from trainer.model.trainable_model import TrainableModel


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
