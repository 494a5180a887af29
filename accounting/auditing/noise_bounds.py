"""An upper bound on the noise multiplier, if batches are sampled as claimed.

Without assumptions, a lower bound on epsilon at a small delta depends on rare errors
and is far from tight.  If the mechanism is the claimed one with another noise
multiplier, that number determines its whole privacy profile, so that common errors
bound it.  This bound is sharper and shows how small a fault of the noise the audit
detects.  Since it depends on an assumption, no verdict uses it.

Formal guarantees, if batches are sampled as claimed, with noise of any size:
  - the noise multiplier exceeds ``noise_multiplier`` with probability at most one minus
    the confidence of the finding; more confidence never gives a smaller bound.
  - ``epsilon`` exceeds the accountant's epsilon for the true noise with at most the
    same probability.

References:
  Nasr et al. (2023), arXiv:2302.07956, section 4: audits by the trade-off curve of the
  claimed mechanism.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math

import numpy as np

from accounting.auditing.audit import Claim, Finding
from accounting.auditing.lower_bounds import ClaimedProfile
from accounting.core import accountant, sampler_registry

#: Noise multipliers are tried on a grid, in steps of 1.5 %.
_STEPS_PER_DOUBLING = 48
_LEAST, _MOST = -2 * _STEPS_PER_DOUBLING, 4 * _STEPS_PER_DOUBLING
_POINTS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class EffectiveNoise:
    """The largest noise multiplier that the error rates allow.

    Attributes:
      confidence: Confidence of both bounds.
      noise_multiplier: An upper bound; None if there is none up to 16 times the claimed
        noise multiplier.
      epsilon: A lower bound on epsilon at the claim's delta.
    """

    confidence: float
    noise_multiplier: float | None
    epsilon: float


def effective_noise(
    claim: Claim, findings: tuple[Finding, ...]
) -> list[EffectiveNoise]:
    """Returns the largest noise multiplier that the error rates of each finding allow.

    Args:
      claim: The tested claim.
      findings: Findings of `audit.judge`, one per confidence.
    """
    family = _Family(claim)
    return [_effective_noise(family, finding) for finding in findings]


class _Family:
    """The claimed mechanism with other noise multipliers, by place on a grid.

    Profiles are cached, since findings of several confidences ask for the same ones.
    """

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        epsilons = claim.epsilon * np.linspace(0, 1, _POINTS) ** 2
        self._epsilons = tuple(map(float, epsilons))
        self._profile = functools.cache(self._make_profile)

    def noise(self, place: int) -> float:
        """Returns the noise multiplier at ``place``; the claimed one is at 0."""
        return self._claim.noise_multiplier * 2.0 ** (place / _STEPS_PER_DOUBLING)

    def epsilon(self, place: int) -> float:
        """Returns the accountant's epsilon at ``place``; 0 if it is infinite."""
        answer = accountant.epsilon(
            self._claim.plan,
            noise_multiplier=self.noise(place),
            delta=self._claim.delta,
            max_examples_per_user=self._claim.max_examples_per_user,
            neighboring_relation=self._claim.neighboring_relation,
        )
        return answer.guarantee if math.isfinite(answer.guarantee) else 0.0

    def refutes(self, finding: Finding, place: int) -> bool:
        """Whether the error rates are too small for this noise, and hence for more.

        Args:
          finding: Bounds on the error rates of the tests.
          place: Place of the noise multiplier on the grid.
        """
        profile = self._profile(place)
        return any(profile.excess(*pair) > 0 for pair in finding.rates)

    def _make_profile(self, place: int) -> ClaimedProfile:
        plan = self._claim.plan
        noise, epsilons = self.noise(place), self._epsilons
        truncation = sampler_registry.get(plan.sampler).truncation
        costs = [0.0] * len(epsilons)
        if truncation is not None:
            # The tighter of the two theorems on truncation takes seconds per point.
            costs = [truncation.delta(plan, epsilon) for epsilon in epsilons]
            plan = truncation.without(plan)
        answers = accountant.delta_curve(
            plan,
            noise_multiplier=noise,
            epsilons=epsilons,
            max_examples_per_user=self._claim.max_examples_per_user,
        )
        deltas = (
            min(1.0, found.guarantee + cost)
            for found, cost in zip(answers, costs, strict=True)
        )
        return ClaimedProfile(epsilons=epsilons, deltas=tuple(deltas))


def _effective_noise(family: _Family, finding: Finding) -> EffectiveNoise:
    if not family.refutes(finding, _MOST):
        return EffectiveNoise(
            confidence=finding.confidence, noise_multiplier=None, epsilon=0.0
        )
    place = _LEAST + bisect.bisect_left(
        range(_LEAST, _MOST), True, key=lambda place: family.refutes(finding, place)
    )
    return EffectiveNoise(
        confidence=finding.confidence,
        noise_multiplier=family.noise(place),
        epsilon=family.epsilon(place),
    )
