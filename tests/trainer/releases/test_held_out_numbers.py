"""Sums over rows of a regression: exact, and moved by their bounds at most."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy import stats

from accounting.core.pld.gaussian import gaussian_noise
from tests.trainer.releases.conftest import farthest
from trainer.model.metrics import ABSOLUTE_ERROR, SQUARED_ERROR
from trainer.releases import estimates
from trainer.releases.estimates import Count, Estimates
from trainer.releases.held_out_sums import HeldOutNumbers, RowSum, release

ERROR_RATE = 1e-6
WILD = np.array([np.nan, np.inf, -np.inf, -3.0, -1.0, 0.5, 1.0, 7.0, 1e308])


def wild_rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which a third have wild labels or predictions."""
    labels, found = rng.uniform(-1, 1, count), rng.uniform(-1, 1, count)
    for values in (labels, found):
        wild = rng.random(count) < 0.2
        values[wild] = rng.choice(WILD, wild.sum())
    return labels, found


def sums_of(
    labels: np.ndarray, found: np.ndarray, most: int | None = None, cap: float = 4.0
) -> dict[str, RowSum]:
    rows = HeldOutNumbers(cap, most)
    rows.add(labels, found)
    return {**({} if most is None else {"rows": rows.count()}), **rows.sums(99)}


@pytest.mark.parametrize("most", [None, 1, 3])
@pytest.mark.parametrize("cap", [4.0, 0.3])
def test_no_row_or_user_moves_the_sums_beyond_their_bounds(
    most: int | None, cap: float
) -> None:
    for seed in range(4):
        rows = wild_rows(np.random.default_rng(seed), 10)
        sums = functools.partial(sums_of, most=most, cap=cap)
        each, together = farthest(sums, *rows, most=most or 1)
        assert max(each.values()) <= 1
        assert together <= 1


def test_the_bounds_are_reached() -> None:
    # Two rows of one user, wrong by the whole range, with the largest label.
    rows = np.r_[1.0, 1.0, 0.0]
    sums = functools.partial(sums_of, most=2)
    each, together = farthest(sums, rows, -rows, most=2)
    assert set(each.values()) == {1.0}
    assert together > 0.99


def estimated(
    labels: np.ndarray, found: np.ndarray, noise: float, most: int | None = None
) -> Estimates:
    rows = HeldOutNumbers(4.0, most)
    rows.add(labels, found)
    count = Count(value=len(labels))
    if most is not None:
        (known,) = release({"rows": rows.count()}, noise).values()
        count = Count(value=float(known.values[0]), noise=known.stddev, most=most)
    return estimates.of_numbers(release(rows.sums(), noise), count, rows.cap)


def population(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels in [-1, 1], and predictions with a squared error of about 0.09."""
    labels = np.clip(rng.normal(0.2, 0.4, count), -1, 1)
    return labels, labels + rng.normal(0, 0.3, count)


def test_metrics_without_noise_are_the_exact_ones() -> None:
    labels, found = population(np.random.default_rng(2), 3_000)
    got = estimated(labels, found, 1e-9)
    for name, exact in (
        (SQUARED_ERROR, np.square(labels - found).mean()),
        (ABSOLUTE_ERROR, np.abs(labels - found).mean()),
    ):
        value = got.metrics[name]
        assert value is not None
        assert value.value == pytest.approx(exact, abs=1e-5)
    assert got.guessing == {SQUARED_ERROR: pytest.approx(labels.var(), abs=1e-5)}
    assert got.num_rows == 3_000


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("epsilon", [0.5, 30.0])
def test_an_interval_has_the_true_value_with_a_probability_of_about_95_percent(
    most: int | None, epsilon: float
) -> None:
    rng, count, hits = np.random.default_rng(1), 300, dict[str, int]()
    noise, short = gaussian_noise(epsilon, 1e-6), 0
    # Of an error that is normal with deviation 0.3.
    truth = {SQUARED_ERROR: 0.09, ABSOLUTE_ERROR: 0.3 * math.sqrt(2 / math.pi)}
    for _ in range(count):
        rows = (x.repeat(most or 1) for x in population(rng, 1_000))
        for name, each in estimated(*rows, noise, most).metrics.items():
            assert each is not None
            low, high = each.interval
            hits[name] = hits.get(name, 0) + (low < truth[name] < high)
            part = (
                each.noise if epsilon < 1 else each.sampling * (1 - (most or 1) ** -0.5)
            )
            short += name == SQUARED_ERROR and abs(each.value - truth[name]) < 1.96 * (
                math.hypot(each.noise, each.sampling) - part
            )
    least = stats.binom.ppf(ERROR_RATE / 8, count, 0.95)
    assert min(hits.values()) >= least
    if epsilon < 1 or most:  # without noise, or as of independent rows, it is too short
        assert short < least
