"""The most noise that errors allow, on mechanisms whose noise is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from accounting.auditing import audit
from accounting.auditing.noise_bounds import EffectiveNoise, effective_noise
from accounting.core import accountant
from tests.accounting.plans import make_plan

GAUSSIAN = make_plan("deterministic", 1, 1, 1)
DELTA = 1e-5


def _found(
    true_noise: float, trials: int, *, confidence: float
) -> tuple[audit.Claim, list[EffectiveNoise]]:
    """What is found of one Gaussian step under the claim of noise multiplier 1."""
    random = np.random.default_rng()
    claim = audit.claim(GAUSSIAN, 1.0, DELTA)
    real, ghost = (random.normal(mean, true_noise, trials // 2) for mean in (1, 0))
    verdict = audit.judge(claim, real, ghost, confidence=confidence)
    return claim, effective_noise(claim, verdict.findings)


@pytest.mark.parametrize("true_noise", [0.6, 1.0, 2.5])
def test_coverage_of_noise_and_epsilon(true_noise: float) -> None:
    """Of 30 audits at confidence 80 % at most 20 % are wrong; error rate 1e-6."""
    known = accountant.epsilon(GAUSSIAN, noise_multiplier=true_noise, delta=DELTA)
    wrong = 0
    for _ in range(30):
        _, (found,) = _found(true_noise, 4000, confidence=0.8)
        too_small = (found.noise_multiplier or np.inf) < true_noise
        assert too_small == (found.epsilon > known.guarantee)
        wrong += too_small
    assert wrong <= stats.binom.ppf(1 - 1e-6, 30, 0.2)


def test_the_bound_is_nearly_tight() -> None:
    """1 / noise is the distance of two Gaussians: a sum of two quantiles.

    At the middle threshold a quantile has a standard error of 1.31 / sqrt(n).  Bounds
    take 2.4 of them off each of two, and luck at most 5 off both together.
    """
    claim, (found,) = _found(1.0, 100_000, confidence=0.95)
    assert found.noise_multiplier is not None
    distance = 1 - (2 * 2.4 + 5 * np.sqrt(2)) * 1.31 / np.sqrt(25_000)
    # One step of the grid, and 9 points for the profile, cost 3 % more.
    assert found.noise_multiplier < 1.03 / distance
    assert found.epsilon > 0.8 * claim.epsilon


def test_less_noise_than_claimed_is_seen() -> None:
    _, (_, found) = _found(0.5, 4000, confidence=0.999)
    assert found.noise_multiplier is not None
    assert found.noise_multiplier < 0.8


def test_more_confidence_never_gives_a_smaller_bound() -> None:
    _, (usual, strict) = _found(1.0, 4000, confidence=0.999)
    assert usual.noise_multiplier is not None
    assert usual.noise_multiplier <= (strict.noise_multiplier or np.inf)
    assert usual.epsilon >= strict.epsilon


def test_errors_that_say_nothing_bound_nothing() -> None:
    claim = audit.claim(GAUSSIAN, 1.0, DELTA)
    same = np.zeros(200)
    verdict = audit.judge(claim, same, same, confidence=0.9)
    (found,) = effective_noise(claim, verdict.findings)
    assert (found.noise_multiplier, found.epsilon) == (None, 0.0)


def test_a_cap_is_accounted_for_by_its_additive_term() -> None:
    """Of a cap that is never reached: as Poisson; of one that always is: nothing."""
    plan = make_plan("truncated-poisson", 400, 100, 4, cap=250)
    claim = audit.claim(plan, 1.0, DELTA)
    finding = audit.Finding(
        confidence=0.9, epsilon_lower_bound=0.0, other_epsilon=0.0,
        other_delta_claimed=0.0, other_delta=0.0, violated=False,
        rates=((0.3, 0.3),),
    )  # fmt: skip
    open_plan = dataclasses.replace(plan, sampler="poisson", truncated_batch_size=None)
    open_claim = audit.claim(open_plan, 1.0, DELTA)
    (capped,), (free,) = (
        effective_noise(known, (finding,)) for known in (claim, open_claim)
    )
    assert capped.noise_multiplier == free.noise_multiplier
    tight = dataclasses.replace(
        claim, plan=dataclasses.replace(plan, truncated_batch_size=100)
    )
    assert effective_noise(tight, (finding,))[0].noise_multiplier is None
