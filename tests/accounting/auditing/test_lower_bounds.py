"""Bounds on rates and on epsilon, against closed forms and exact probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from accounting.auditing import verdicts
from accounting.auditing.verdicts import ClaimedProfile
from accounting.core.pld.gaussian import gaussian_delta


@pytest.mark.parametrize("trials", [1, 2, 10, 1000, 100_000])
@pytest.mark.parametrize("error", [0.3, 0.05, 1e-4])
def test_rates_are_those_of_clopper_and_pearson(trials: int, error: float) -> None:
    counts = sorted({0, 1, trials // 3, trials - 1, trials})
    for count in counts:
        exact = stats.binomtest(count, trials).proportion_ci(
            confidence_level=1 - 2 * error, method="exact"
        )
        upper = verdicts.upper_rate(count, trials, error)
        assert upper == pytest.approx(exact.high, rel=1e-9)
        lower = verdicts.lower_rate(count, trials, error)
        assert lower == pytest.approx(exact.low, rel=1e-7, abs=1e-12)
        if count < trials:
            # The definition: so few successes have this probability at the bound.
            tail = stats.binom.cdf(count, trials, upper)
            assert tail == pytest.approx(error, rel=1e-6)
    assert np.array_equal(
        verdicts.upper_rate(np.array(counts), trials, error),
        [verdicts.upper_rate(count, trials, error) for count in counts],
    )


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_coverage_of_epsilon(epsilon: float) -> None:
    """Exact, for randomised response, whose errors say all there is about epsilon."""
    trials, error, delta = 60, 0.2, 1e-6
    wrong = 1 / (1 + math.exp(epsilon))
    counts = np.arange(trials + 1)
    # Both rates have the same law, and hold jointly with probability 1 - error.
    rates = verdicts.upper_rate(counts, trials, error / 2)
    found = verdicts.epsilon_bound(rates[:, None], rates[None, :], delta)
    mass = stats.binom.pmf(counts, trials, wrong)
    assert np.sum((mass[:, None] * mass)[found > epsilon + 1e-12]) <= error


def test_epsilon_of_known_rates() -> None:
    bound = verdicts.epsilon_bound
    # ln((1 - 0.2 - 0.1) / 0.1), and the same with the roles exchanged.
    assert bound(0.1, 0.2, 0.1) == pytest.approx(math.log(7))
    assert bound(0.2, 0.1, 0.1) == pytest.approx(math.log(7))
    assert bound(0.5, 0.5, 0.0) == 0
    assert bound(1.0, 1.0, 1e-5) == 0
    assert bound(0.0, 1.0, 1e-5) == 0
    assert bound(0.0, 0.5, 1e-5) == math.inf


def _gaussian_profile(noise: float, count: int = 400) -> ClaimedProfile:
    epsilons = np.linspace(0, 12, count)
    return ClaimedProfile(
        epsilons=tuple(epsilons),
        deltas=tuple(gaussian_delta(noise, epsilon) for epsilon in epsilons),
    )


def test_excess_is_positive_only_for_rates_that_contradict_a_claim() -> None:
    """The optimal tests of two Gaussians touch their profile and never cross it."""
    noise = 0.7
    profile = _gaussian_profile(noise)
    threshold = np.linspace(-4, 6, 101)
    fpr = stats.norm.sf(threshold / noise)
    fnr = stats.norm.cdf((threshold - 1) / noise)
    assert np.all(profile.excess(fpr, fnr) <= 1e-9)
    # Where neither error is rare, a little fewer errors are too few.
    middle = (fpr > 0.05) & (fnr > 0.05)
    assert np.all(profile.excess(0.97 * fpr, 0.97 * fnr)[middle] > 0)
    assert profile.least_fnr(fpr) == pytest.approx(fnr, abs=2e-3)
    assert np.all(profile.least_fnr(fpr) <= fnr + 1e-9)
