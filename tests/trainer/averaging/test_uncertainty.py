"""Intervals from kept iterates: by hand, and how often they cover a mean."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq
import pytest

from trainer.averaging.iterates import (
    PREDICTION,
    OutputsByName,
    student_interval,
    write_uncertainty,
)
from trainer.model.metrics import BINARY
from trainer.model.rows import Target


def _outputs(logits: Sequence[Sequence[float]]) -> OutputsByName:
    outputs = OutputsByName(BINARY, PREDICTION)
    for row in logits:
        outputs.add(np.array(row))
    return outputs


def test_the_interval_by_hand() -> None:
    # t of 3 degrees of freedom at 0.975 is 3.182446 (any table).
    low, high = student_interval(
        np.array([0.5, 0.99]), np.array([0.04, 0.04]), num_iterates=4, level=0.95
    )
    np.testing.assert_allclose(low, [0.5 - 0.06364893, 0.99 - 0.06364893], atol=1e-7)
    np.testing.assert_allclose(high, [0.5 + 0.06364893, 1.0], atol=1e-7)


def test_the_interval_covers_the_mean_of_independent_normal_draws() -> None:
    # 40,000 intervals: the standard error of a coverage of 0.9 is 0.0015; 5 of them are
    # exceeded with probability 6e-7.  Normal instead of Student: 0.81 for k = 3.
    draws = np.random.default_rng(0).normal(0.5, 0.01, (40_000, 3))
    low, high = student_interval(
        draws.mean(1), draws.std(1, ddof=1), num_iterates=3, level=0.9
    )
    covered = ((low <= 0.5) & (high >= 0.5)).mean()
    assert abs(covered - 0.9) < 0.0075


def test_the_file_has_a_row_per_example(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "uncertainty.parquet"
    outputs = _outputs([[0.0, 2.0], [0.2, 1.0], [-0.1, 1.5]])
    summary = write_uncertainty(path, outputs, steps=(6, 8, 10), level=0.9)
    table = pq.read_table(path)
    assert table.column_names == ["prediction", "stddev", "low", "high"]
    columns = {name: np.array(table[name]) for name in table.column_names}
    np.testing.assert_array_equal(columns["prediction"], outputs[PREDICTION].mean)
    half = 2.919986 * columns["stddev"] / np.sqrt(3)
    np.testing.assert_allclose(columns["high"] - columns["prediction"], half, rtol=1e-6)
    np.testing.assert_allclose(columns["prediction"] - columns["low"], half, rtol=1e-6)
    assert summary["mean_width"] == pytest.approx(2 * half.mean(), rel=1e-6)
    told = {
        name: values * 50.0 if name == "stddev" else 100.0 + values * 50.0
        for name, values in columns.items()
    }
    target = Target(name="y", range=(50.0, 150.0))
    wide = write_uncertainty(path, outputs, steps=(6, 8, 10), level=0.9, target=target)
    assert wide["mean_width"] == pytest.approx(50 * summary["mean_width"])
    table = pq.read_table(path)
    for name, values in told.items():
        np.testing.assert_allclose(np.array(table[name]), values)
