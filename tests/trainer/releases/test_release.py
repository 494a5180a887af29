"""Released numbers, and what an evaluation costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from accounting.core.pld.dominating_pairs import gaussian_epsilon
from pipelines.core.users import Bounded
from trainer.releases.estimates import Count
from trainer.releases.evaluate import EvaluationPrice, most_rows
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


BOUNDED = Bounded(user_column="u", max_examples_per_user=5, num_examples=9_000)


def test_the_noise_of_users_leaves_room_for_the_bound_on_their_rows() -> None:
    found = EvaluationPrice.of_one(1.0, 1e-6, of_run=2.0, bounded=BOUNDED)
    assert found.of_rows == 1e-8
    assert gaussian_epsilon(found.noise_multiplier, found.delta - found.of_rows) <= 1
    # With all of delta for the noise it would be less.
    rows = EvaluationPrice.of_one(1.0, 1e-6, of_run=2.0)
    assert rows.of_rows == 0
    assert rows.noise_multiplier < found.noise_multiplier
    assert "one user, of whom `dpsgd prepare` kept at most 5 rows" in found.claim
    assert "zero-out and the add-or-remove relation" in found.claim
    assert "together are (2.0000, 1e-06)-differentially private for one user" in (
        found.claim
    )


def test_the_bound_is_below_the_rows_with_its_part_of_delta_at_most() -> None:
    of_rows, count, true = 0.02, 20_000, 5_000
    one = RowSum(values=np.full(count, true), bound=5, share=0.2)
    released = release({"rows": one}, 4.0)["rows"]
    counts = (Count(value=n, noise=released.stddev, most=5) for n in released.values)
    bounds = np.array([most_rows(each, BOUNDED, of_rows) for each in counts])
    # The neighbour may have k rows more, which the bound covers, too.
    below = int((bounds < true + 5).sum())
    assert below <= stats.binom.ppf(1 - ERROR_RATE, count, of_rows)
    assert below >= stats.binom.ppf(ERROR_RATE, count, of_rows / 2)  # and is not idle


@pytest.mark.parametrize(("of_rows", "most"), [(0.0, 9_000), (1e-8, 3_266)])
def test_the_public_number_bounds_the_rows_where_no_delta_is_left_for_it(
    of_rows: float, most: int
) -> None:
    rows = Count(value=3_000, noise=46.3, most=5)
    # 3,000 + 5 + 1 + 46.3 times the quantile of normal noise.
    wanted = 3_006 + 46.3 * stats.norm.isf(1e-8) if of_rows else 9_000
    assert most_rows(rows, BOUNDED, of_rows) == np.ceil(wanted)
    assert np.ceil(wanted) == most
    many = Count(value=8_990, noise=46.3, most=5)
    assert most_rows(many, BOUNDED, of_rows) == 9_000
