"""Audits: rare false alarms, no cherry picking, and enough power to be of use."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from accounting import audits
from accounting.audits import AuditedClaim, ClaimedProfile
from accounting.core.pld.dominating_pairs import gaussian_delta, gaussian_epsilon
from accounting.core.validation import InputError
from tests.accounting.plans import make_plan

#: One example in one step: exactly one Gaussian mechanism.
GAUSSIAN = make_plan("deterministic", 1, 1, 1)
DELTA = 1e-5


def _scores(
    noise: float, trials: int, *, true_noise: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Log likelihood ratios of one Gaussian step, with and without the example."""
    random = np.random.default_rng()
    true_noise = noise if true_noise is None else true_noise
    outputs = [random.normal(mean, true_noise, trials // 2) for mean in (1, 0)]
    real, ghost = ((2 * x - 1) / (2 * noise**2) for x in outputs)
    return real, ghost


def _randomised_response(epsilon: float) -> AuditedClaim:
    points = np.linspace(0, epsilon, 9)
    deltas = (math.exp(epsilon) - np.exp(points)) / (1 + math.exp(epsilon))
    return AuditedClaim(
        plan=GAUSSIAN,
        noise_multiplier=1.0,
        delta=1e-9,
        epsilon=epsilon,
        profile=ClaimedProfile(epsilons=tuple(points), deltas=(*deltas[:-1], 1e-9)),
    )


def test_false_alarm_of_a_mechanism_whose_every_error_counts() -> None:
    """Randomised response touches its whole profile; 400 audits at confidence 60 %.

    At most 40 % may be violated; more than the bound below has probability 1e-6 then.
    (Bounds replaced by the rates themselves are violated in three of four audits.)
    """
    epsilon, tries = 1.0, 400
    claim = _randomised_response(epsilon)
    random = np.random.default_rng()
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    alarms = 0
    for _ in range(tries):
        real = (random.random(100) < right).astype(float)
        ghost = (random.random(100) < 1 - right).astype(float)
        verdict = audits.judge(claim, real, ghost, confidence=0.6)
        alarms += verdict.violated
    assert alarms <= stats.binom.ppf(1 - 1e-6, tries, 0.4)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_coverage_on_the_exact_gaussian(noise: float) -> None:
    claim = audits.claim(GAUSSIAN, noise, DELTA)
    assert claim.epsilon == pytest.approx(gaussian_epsilon(noise, DELTA))
    wrong = 0
    for _ in range(50):
        verdict = audits.judge(claim, *_scores(noise, 2000), confidence=0.8)
        found = verdict.findings[-1]
        wrong += verdict.violated or found.epsilon_lower_bound > claim.epsilon
    assert wrong <= stats.binom.ppf(1 - 1e-6, 50, 0.2)


def test_no_cherry_picking(monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses a threshold is not what is counted at it."""
    seen: dict[str, list[np.ndarray]] = {"chosen": [], "counted": []}
    count = audits.count_errors

    def choosing(real: np.ndarray, ghost: np.ndarray, *rest: object) -> float:
        seen["chosen"] += [real, ghost]
        return float(np.median(real))

    def counting(real: np.ndarray, ghost: np.ndarray, threshold: float) -> object:
        seen["counted"] += [real, ghost]
        return count(real, ghost, threshold)

    monkeypatch.setattr(audits, "choose_threshold", choosing)
    monkeypatch.setattr(audits, "count_errors", counting)
    claim = audits.claim(GAUSSIAN, 1.0, DELTA)
    audits.judge(claim, *_scores(1.0, 400), confidence=0.9)
    chosen, counted = (set(np.concatenate(part)) for part in seen.values())
    assert len(chosen) == len(counted) == 200
    assert not chosen & counted


def test_half_the_noise_is_found() -> None:
    """The total variation is 0.68 where 0.38 is claimed: 2000 trials are plenty."""
    claim = audits.claim(GAUSSIAN, 1.0, DELTA)
    scores = _scores(1.0, 2000, true_noise=0.5)
    verdict = audits.judge(claim, *scores, confidence=0.999)
    assert verdict.violated
    *_, last = verdict.findings
    found = dataclasses.replace(last, other_delta=0.27951, other_delta_claimed=0.25049)
    said = dataclasses.replace(verdict, findings=(found,)).text
    assert "VIOLATED: at epsilon" in said
    # Seen to fail: both were rounded to nearest.
    assert "at least 2.79e-01" in said
    assert "claimed is 2.51e-01" in said


def test_slack_is_taken_off_both_rates() -> None:
    claim = audits.claim(GAUSSIAN, 1.0, DELTA)
    scores = _scores(1.0, 2000, true_noise=0.5)
    loose = audits.judge(claim, *scores, confidence=0.999, slack=0.5)
    assert not loose.violated
    assert loose.findings[-1].epsilon_lower_bound == 0


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(InputError, match=r"noise_multiplier=0.0 > 0"):
        audits.claim(GAUSSIAN, 0.0, DELTA)
    claim = audits.claim(GAUSSIAN, 1.0, DELTA)
    with pytest.raises(InputError, match="trials=30 >= 40"):
        audits.judge(claim, *_scores(1.0, 30), confidence=0.9)
    with pytest.raises(InputError, match=r"confidence=1.5 < 1"):
        audits.judge(claim, *_scores(1.0, 400), confidence=1.5)


# -- bounds on rates and on epsilon, against closed forms and exact probabilities ------


@pytest.mark.parametrize("trials", [1, 2, 10, 1000, 100_000])
@pytest.mark.parametrize("error", [0.3, 0.05, 1e-4])
def test_rates_are_those_of_clopper_and_pearson(trials: int, error: float) -> None:
    counts = sorted({0, 1, trials // 3, trials - 1, trials})
    for count in counts:
        exact = stats.binomtest(count, trials).proportion_ci(
            confidence_level=1 - 2 * error, method="exact"
        )
        upper = audits.upper_rate(count, trials, error)
        assert upper == pytest.approx(exact.high, rel=1e-9)
        if count < trials:
            # The definition: so few successes have this probability at the bound.
            tail = stats.binom.cdf(count, trials, upper)
            assert tail == pytest.approx(error, rel=1e-6)
    assert np.array_equal(
        audits.upper_rate(np.array(counts), trials, error),
        [audits.upper_rate(count, trials, error) for count in counts],
    )


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_coverage_of_epsilon(epsilon: float) -> None:
    """Exact, for randomised response, whose errors say all there is about epsilon."""
    trials, error, delta = 60, 0.2, 1e-6
    wrong = 1 / (1 + math.exp(epsilon))
    counts = np.arange(trials + 1)
    # Both rates have the same law, and hold jointly with probability 1 - error.
    rates = audits.upper_rate(counts, trials, error / 2)
    found = audits.epsilon_bound(rates[:, None], rates[None, :], delta)
    mass = stats.binom.pmf(counts, trials, wrong)
    assert np.sum((mass[:, None] * mass)[found > epsilon + 1e-12]) <= error


def test_epsilon_of_known_rates() -> None:
    bound = audits.epsilon_bound
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
