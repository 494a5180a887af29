"""Checks of residuals: rarely wrong on noise, and never blind to what they are for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from tests.trainer.auditing import residuals
from tests.trainer.auditing.residuals import TOLERANCE, Check


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng().normal(size=shape)


def _deviations(values: np.ndarray) -> Check:
    counts = [values.shape[1]] * len(values)
    return residuals.deviations("d", np.sum(values**2, 1), counts)


def _contributions(values: np.ndarray, noise: float = 1.0) -> Check:
    counts = [values.shape[1]] * len(values)
    return residuals.contributions("c", values.sum(1), counts, noise)


def _largest(values: np.ndarray) -> Check:
    return residuals.largest("l", float(np.abs(values).max()), values.size)


def _correlations(values: np.ndarray) -> Check:
    ragged = [row[: len(row) - 7 * index] for index, row in enumerate(values)]
    return residuals.correlations("r", [ragged, [ragged[0]], []])


def _repetitions(values: np.ndarray) -> Check:
    return residuals.repetitions("t", values[0], values[1])


CHECKS = (_deviations, _contributions, _largest, _correlations, _repetitions)


@pytest.mark.parametrize("make", CHECKS)
def test_a_p_value_is_small_as_rarely_as_it_says(
    make: Callable[[np.ndarray], Check],
) -> None:
    """Of 500 at most 5 % are below 0.05; more than the bound has probability 1e-6."""
    below = sum(make(_normal(4, 60)).p_value < 0.05 for _ in range(500))
    assert below <= stats.binom.ppf(1 - 1e-6, 500, 0.05)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        # Each is twenty standard deviations out, or more.
        (_deviations, lambda values: values * np.array([[1], [1], [0.5], [1]])),
        (_deviations, lambda values: values * np.array([[1], [1.5], [1], [1]])),
        (_deviations, lambda values: values * 0),
        (_contributions, lambda values: values + np.array([[0], [1], [0], [0]])),
        (_largest, lambda values: np.where(np.arange(1000) == 9, 30.0, values)),
        (_correlations, lambda values: values[[0, 1, 2, 1]]),
        (_repetitions, lambda values: np.stack([values[0], np.roll(values[0], 300)])),
    ],
)
def test_a_fault_is_seen(
    make: Callable[[np.ndarray], Check], fault: Callable[[np.ndarray], np.ndarray]
) -> None:
    check = make(fault(_normal(4, 1000)))
    assert check.p_value < 1e-12
    others = [make(_normal(4, 1000)) for make in (_deviations, _largest)]
    # Of three, each with a third of the error: one in a million is by chance.
    assert residuals.contradicted([*others, check], 1e-6) == [check]


def test_contributions_are_in_clip_norms_and_may_round() -> None:
    values = np.ones((1, 100))
    assert _contributions(values, noise=0.25).worst == pytest.approx(0.25)
    rounded = np.array([0.9 * TOLERANCE / 1e-6 * 10**6])
    check = residuals.contributions("c", rounded, [10**6], 1e-6)
    assert check.p_value == 1.0
    check = residuals.contributions("c", 2 * rounded, [10**6], 1e-6)
    assert check.p_value == 0.0
