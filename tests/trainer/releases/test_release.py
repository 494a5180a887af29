"""One Gaussian release of sums over held-out rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from trainer.releases.held_out_sums import RowSum, release

#: Of each statistical test.
ERROR_RATE = 1e-6


def _squares(stddev: float, count: int) -> float:
    """Returns the sum of squares of released noise, over its variance."""
    zeros = {"counts": RowSum(values=np.zeros(count, np.int64), bound=900, share=0.36)}
    (found,) = release(zeros, stddev).values()
    assert found.stddev == pytest.approx(stddev * 900 / math.sqrt(0.36))
    return float(np.sum((found.values / found.stddev) ** 2))


def test_noise_has_the_stated_deviation() -> None:
    count = 20_000
    low, high = stats.chi2.ppf([ERROR_RATE / 2, 1 - ERROR_RATE / 2], count)
    found = _squares(2.0, count)
    assert low < found < high
    # Noise that is 4 % too small is seen.
    assert not low < found * 0.96**2 < high


def test_two_releases_have_independent_noise() -> None:
    zeros = {
        name: RowSum(values=np.zeros(5_000, np.int64), bound=10_000, share=0.5)
        for name in ("counts", "loss")
    }
    drawn = [each.values for _ in range(2) for each in release(zeros, 1.0).values()]
    limit = stats.norm.ppf(1 - ERROR_RATE / 12) / math.sqrt(5_000)
    found = np.abs(np.corrcoef(drawn) - np.eye(4))
    assert found.max() < limit
    drawn[1] = drawn[0] + drawn[1]  # a shared part of half the variance is seen
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() > limit


@pytest.mark.parametrize(("share", "noise"), [(0.6, 1.0), (0.5, 0.0), (0.5, math.nan)])
def test_more_than_one_in_shares_or_no_noise_is_refused(
    share: float, noise: float
) -> None:
    one = RowSum(values=np.zeros(1, np.int64), bound=1, share=share)
    with pytest.raises(ValueError, match="Expected shares of at most 1"):
        release({"a": one, "b": one}, noise)
