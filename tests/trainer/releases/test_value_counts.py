"""Counts of values, and the quantiles that they give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from trainer.releases import table_counts
from trainer.releases.held_out_sums import NoisySum, RowSum, release
from trainer.releases.table_counts import (
    NUM_BINS,
    Quantiles,
    bins,
    count_values,
    in_groups,
)

ERROR_RATE = 1e-6
WILD = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-30, 3e38, -3e38],
    np.float32,
)


def any_floats(count: int, seed: int) -> np.ndarray:
    """Floats of any bits."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    return np.concatenate([bits.view(np.float32), WILD])


def test_every_value_is_in_one_bin_or_missing() -> None:
    with np.errstate(invalid="ignore"):
        values = any_floats(100_000, seed=0)
    found = bins(values)
    assert found.min() >= 0
    np.testing.assert_array_equal(found == NUM_BINS, np.isnan(values))
    known = values[~np.isnan(values)].astype(np.float64)
    order = np.argsort(known)
    assert (np.diff(bins(known[order].astype(np.float32))) >= 0).all()
    # Within the bins' reach, a value is between the ends of its bin.
    low, high = table_counts._ends()
    size = np.abs(known)
    inside = (size >= 2.0**-31) & (size < 2.0**64)
    place = bins(known.astype(np.float32))
    assert (known[inside] >= low[place[inside]]).all()
    assert (known[inside] <= high[place[inside]]).all()
    assert set(place[size < 2.0**-31]) == {NUM_BINS // 2}


def test_a_row_moves_each_array_of_counts_by_one() -> None:
    values = any_floats(200, seed=1)
    whole = count_values(values)
    for row in range(len(values)):
        others = count_values(np.delete(values, row))
        assert np.abs(whole - others).sum() == 1
        moved = np.abs(in_groups(whole) - in_groups(others)).sum()
        assert moved == (not np.isnan(values[row]))


def quantiles(values: np.ndarray, noise: float) -> Quantiles:
    counts = count_values(values.astype(np.float32))
    sums = {
        "single": RowSum(values=counts, bound=1, share=0.5),
        "groups": RowSum(values=in_groups(counts), bound=1, share=0.5),
    }
    found = release(sums, noise)
    return Quantiles(found["single"], found["groups"], len(values))


SAMPLES = {
    "ages": lambda rng: rng.integers(17, 80, 50_000),
    "money": lambda rng: rng.lognormal(8, 2, 50_000),
    "both signs": lambda rng: rng.normal(0, 1e-3, 50_000),
    "mostly 0": lambda rng: np.where(rng.random(50_000) < 0.8, 0, rng.random(50_000)),
    "negative": lambda rng: -rng.exponential(1e6, 50_000),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_quantiles_have_about_their_share_of_the_values(name: str) -> None:
    values, noise = SAMPLES[name](np.random.default_rng(2)), 4.0
    found = quantiles(values, noise)
    # The largest of 1,521 errors: each is normal, of at most this deviation.
    stddev = table_counts.noise_of_rank(noise * math.sqrt(2))
    most = stats.norm.isf(ERROR_RATE / NUM_BINS) * stddev / len(values)
    for share in (0.02, 0.5, 0.98):
        low, high = found.low(share), found.high(share)
        assert low <= high
        assert (values < low).mean() <= share + most
        assert (values <= high * (1 + 1e-6 * np.sign(high))).mean() >= share - most


def test_a_rank_has_no_more_noise_than_stated() -> None:
    stddev, count = 7.0, 400
    rng, squares = np.random.default_rng(3), []
    for _ in range(count):
        single, groups = (
            NoisySum(values=rng.normal(0, stddev, size), stddev=stddev)
            for size in (NUM_BINS + 1, table_counts.NUM_GROUPS)
        )
        squares.append(Quantiles(single, groups, num_rows=0)._rough ** 2)
    # The largest of 1,521 means of squares of normal values.
    limit = stats.chi2.isf(ERROR_RATE / NUM_BINS, count) / count
    most = np.mean(squares, axis=0).max()
    assert most <= limit * table_counts.noise_of_rank(stddev) ** 2
    # A bound of half as much is seen to be too small.
    assert most > limit * table_counts.noise_of_rank(stddev / 2) ** 2


def test_bins_that_hide_all_values_are_told_from_those_that_do_not() -> None:
    """Seen to fail: of milliseconds since 1970 every value was the largest."""
    rng = np.random.default_rng(2)
    for values, reached in (
        (rng.uniform(1.3e12, 1.7e12, 5_000), True),  # milliseconds
        (rng.uniform(1.3e18, 1.7e18, 5_000), True),  # nanoseconds
        (rng.uniform(1e-9, 1e-7, 5_000), True),
        (np.full(5_000, 7.0), True),
        (np.zeros(5_000), False),
        (rng.uniform(1e20, 1e30, 5_000), False),
        (-rng.uniform(1e20, 1e30, 5_000), False),
    ):
        found = quantiles(values, 1.0)
        assert found.reaches(found.low(0.05), found.high(0.95)) == reached
