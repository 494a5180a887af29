"""How much noise there can be at most, if the batches are made as is claimed.

A bound on epsilon that assumes nothing is far from tight: at a small delta, rare errors
alone tell it apart from 0.  If the mechanism is the claimed one with some other noise,
its whole profile moves with that one number, and common errors pin it down.  That is
sharper, says how large a fault of the noise would have been seen, and rests on an
assumption: it is no part of a verdict.

Formal guarantees, if the batches are made as claimed, and the noise is of any size:
  - the noise exceeds ``noise_multiplier`` with a probability of at most one minus the
    confidence of the finding; more confidence never gives a smaller bound.
  - ``epsilon`` exceeds what the accountant has for the true noise as rarely.

References:
  Nasr et al. (2023), arXiv:2302.07956, section 4: audits by the trade-off curve of the
  mechanism that is claimed.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math

import numpy as np

from accounting import accountant
from accounting.auditing.audit import Claim, Finding
from accounting.auditing.lower_bounds import Profile
from accounting.samplers import truncated_poisson

#: Noise multipliers are tried on a grid, in steps of 1.5 %.
_STEPS_PER_DOUBLING = 48
_LEAST, _MOST = -2 * _STEPS_PER_DOUBLING, 4 * _STEPS_PER_DOUBLING
_POINTS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class EffectiveNoise:
    """The most noise that found errors allow.

    Attributes:
      confidence: Of both.
      noise_multiplier: An upper bound; None if there is none up to 16 times the claim.
      epsilon: A lower bound, at the claim's delta.
    """

    confidence: float
    noise_multiplier: float | None
    epsilon: float


def effective_noise(
    claim: Claim, findings: tuple[Finding, ...]
) -> list[EffectiveNoise]:
    """Returns the most noise that the errors of each finding allow."""
    family = _Family(claim)
    return [_effective_noise(family, finding) for finding in findings]


class _Family:
    """The claimed mechanism with other noise multipliers, by their place on the grid.

    Findings of several confidences ask for the same profiles: each is kept.
    """

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        epsilons = claim.epsilon * np.linspace(0, 1, _POINTS) ** 2
        self._epsilons = tuple(map(float, epsilons))
        self._profile = functools.cache(self._make_profile)

    def noise(self, place: int) -> float:
        """Returns the noise multiplier at ``place``; that of the claim at 0."""
        return self._claim.noise_multiplier * 2.0 ** (place / _STEPS_PER_DOUBLING)

    def epsilon(self, place: int) -> float:
        """Returns what the accountant has there; 0 if it has nothing finite."""
        answer = accountant.epsilon(
            self._claim.plan,
            noise_multiplier=self.noise(place),
            delta=self._claim.delta,
        )
        return answer.guarantee if math.isfinite(answer.guarantee) else 0.0

    def refutes(self, finding: Finding, place: int) -> bool:
        """Whether the errors are too few for this noise, and so for any more of it."""
        profile = self._profile(place)
        return any(profile.excess(*pair) > 0 for pair in finding.rates)

    def _make_profile(self, place: int) -> Profile:
        plan = self._claim.plan
        noise, epsilons = self.noise(place), self._epsilons
        if plan.truncated_batch_size is None:
            answers = accountant.delta_curve(
                plan, noise_multiplier=noise, epsilons=epsilons
            )
            deltas = [found.guarantee for found in answers]
        else:
            # The better of two theorems would take seconds per point.
            deltas = [
                truncated_poisson.additive_delta(plan, noise, epsilon)
                for epsilon in epsilons
            ]
        return Profile(epsilons=epsilons, deltas=tuple(deltas))


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
