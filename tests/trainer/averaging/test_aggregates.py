"""Aggregates of kept iterates: formulas by hand, and intervals."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.model.metrics import BINARY, CLASSES, binary_metrics
from trainer.model.rows import Target
from trainer.run.iterates import (
    PREDICTION,
    Outputs,
    OutputsByName,
    ema_weights,
    majority_metrics,
    student_interval,
    weighted_mean,
    write_uncertainty,
)


def _logit(probability: float) -> float:
    return float(np.log(probability / (1 - probability)))


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_the_weights_sum_to_one_and_do_not_fall(count: int, decay: float) -> None:
    weights = ema_weights(count, decay)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert (np.diff(weights) >= 0).all()
    assert (weights >= 0).all()
    recursive = np.zeros(count)
    for index in range(count):
        beta = 1.0 if index == 0 else (1 - decay) / (1 - decay ** (index + 1))
        recursive *= 1 - beta
        recursive[index] = beta
    # 1 - d^i cancels where d is next to 1.
    if decay < 0.999:
        np.testing.assert_allclose(weights, recursive, rtol=1e-6, atol=1e-12)


def test_the_mean_of_weights_by_hand() -> None:
    iterates = [
        [np.array([1.0, 2.0], "f4"), np.array(3.0, "f4")],
        [np.array([2.0, 0.0], "f4"), np.array(3.0, "f4")],
        [np.array([6.0, 1.0], "f4"), np.array(0.0, "f4")],
    ]
    upa = weighted_mean(iterates, np.full(3, 1 / 3))
    ema = weighted_mean(iterates, ema_weights(3, 0.5))  # 1/7, 2/7, 4/7
    for found, wanted in (
        (upa[0], [3, 1]), (upa[1], 2), (ema[0], [29 / 7, 6 / 7]), (ema[1], 9 / 7)
    ):  # fmt: skip
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert found.dtype == np.float32


def test_outputs_of_three_iterates_by_hand() -> None:
    # Probabilities of label 1, a row per iterate, a column per example.
    table = np.array([[0.2, 0.6, 0.9], [0.4, 0.4, 0.8], [0.6, 0.8, 0.7]])
    outputs = Outputs(BINARY)
    for row in table:
        outputs.add(np.array([_logit(p) for p in row]))
    np.testing.assert_allclose(outputs.mean, [0.4, 0.6, 0.8])
    np.testing.assert_allclose(outputs.outputs, [_logit(0.4), _logit(0.6), _logit(0.8)])
    # (0.04 + 0 + 0.04) / 2 and so on.
    np.testing.assert_allclose(outputs.stddev**2, [0.04, 0.04, 0.01])
    assert outputs.vote_share.tolist() == [1 / 3, 2 / 3, 1]
    assert outputs.majority.tolist() == [0, 1, 1]
    labels = np.array([0, 1, 0])
    opa = binary_metrics(labels, outputs.outputs)
    assert opa["auc"] == 0.5
    assert opa["log_loss"] == pytest.approx(-np.log(0.6 * 0.6 * 0.2) / 3)
    assert opa["accuracy"] == pytest.approx(2 / 3)
    omv = majority_metrics(labels, outputs)
    assert (omv["auc"], omv["log_loss"]) == (0.5, None)
    assert omv["accuracy"] == pytest.approx(2 / 3)


def test_the_logit_of_the_mean_is_finite_where_probabilities_round() -> None:
    outputs = Outputs(BINARY)
    outputs.add(np.array([800.0, -800.0]))
    outputs.add(np.array([700.0, -900.0]))
    assert outputs.mean.tolist() == [1.0, 0.0]
    # 1 - p is 1e-304 / 2 or so: -log of it is 700 + log 2.
    np.testing.assert_allclose(
        outputs.outputs, [700 + np.log(2), -800 + np.log(0.5)], rtol=1e-12
    )


def _log(table: list[list[float]]) -> np.ndarray:
    # Logits are the logarithms of probabilities, up to a number for each row.
    return np.log(np.array(table, np.float32)) + 7


def test_classes_by_hand() -> None:
    outputs = Outputs(CLASSES)
    outputs.add(_log([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]))
    outputs.add(_log([[0.1, 0.6, 0.3], [0.1, 0.1, 0.8]]))
    outputs.add(_log([[0.3, 0.3, 0.4], [0.4, 0.3, 0.3]]))
    mean = [[0.3, 0.4, 0.3], [0.2, 0.2, 0.6]]
    np.testing.assert_allclose(outputs.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(np.exp(outputs.outputs), mean, rtol=1e-6)
    assert outputs.outputs.dtype == np.float32
    np.testing.assert_allclose(outputs.stddev[0] ** 2, [0.04, 0.03, 0.01], rtol=1e-5)
    # One vote for each class of the first example: the first of them.
    np.testing.assert_allclose(outputs.vote_share, [[1 / 3] * 3, [1 / 3, 0, 2 / 3]])
    assert outputs.majority.tolist() == [0, 2]
    for labels in (np.array([1, 2]), np.eye(3)[[1, 2]]):
        found = majority_metrics(labels, outputs)
        assert (found["accuracy"], found["log_loss"]) == (0.5, None)


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


def test_the_file_has_a_row_per_example(tmp_path: pathlib.Path) -> None:
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
