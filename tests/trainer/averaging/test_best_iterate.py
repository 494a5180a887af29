"""Which rows a run without privacy leaves out, and which iterate it keeps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trainer.averaging.averages import BestIterate, without_held_out
from trainer.core.tf_compat import tf


def _batch(values: Any, weight: Any = None) -> dict[str, Any]:
    values = np.asarray(values, np.float32)
    weight = np.ones(len(values), np.float32) if weight is None else weight
    columns = {
        "x": tf.constant(values),
        "flag": tf.constant(values > 0),
        "label": tf.constant(np.zeros((len(values), 2), np.int8)),
    }
    return {"columns": columns, "weight": tf.constant(weight), "step": 0, "part": 0}


def test_one_row_in_ten_trains_nothing_wherever_it_is() -> None:
    values = np.arange(20_000, dtype=np.float32)
    random = np.random.default_rng(0)
    places = random.permutation(len(values))
    kept, moved = (
        np.asarray(without_held_out(_batch(each))["weight"])
        for each in (values, values[places])
    )
    np.testing.assert_array_equal(moved, kept[places])
    # A binomial count is this far off by chance once in two million tests.
    tolerance = 5 * math.sqrt(0.1 * 0.9 / len(values))
    assert abs(np.mean(kept == 0) - 0.1) < tolerance
    assert set(kept) == {0.0, 1.0}


def test_padding_stays_padding() -> None:
    padded = _batch(np.arange(100), np.zeros(100, np.float32))
    assert not np.any(without_held_out(padded)["weight"])


@pytest.fixture
def weight() -> Any:
    return tf.Variable([0.0])


def test_the_weights_with_the_least_loss_of_rows_left_out_are_restored(
    weight: Any,
) -> None:
    """The loss of a row is 0 where the weight is the mean of the rows left out."""
    values = np.arange(1000, dtype=np.float32)
    batch = _batch(values)
    left_out = values[np.asarray(without_held_out(batch)["weight"]) == 0]

    def losses(columns: Any) -> Any:
        return tf.square(columns["x"] - weight)

    # Rows that come again, and padding, count once and not at all.
    padding = _batch(values + 5000, np.zeros(1000, np.float32))
    best = BestIterate([weight], losses, [batch, padding, batch])
    for step, value in enumerate([0.0, left_out.mean(), left_out.mean() + 1, np.nan]):
        weight.assign([value])
        best.update(step)
    best.restore()
    assert best.step == 1
    np.testing.assert_array_equal(weight.numpy(), [left_out.mean()])
    assert float(best.variables[-2]) == pytest.approx(left_out.var(), rel=1e-4)
