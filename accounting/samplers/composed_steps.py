"""T independent steps of given dominating pairs, for relations other than zero-out.

Formal guarantees:
  - ``delta`` and ``epsilon`` bound both directions from above.
  - They never exceed the bounds of the Gaussian mechanism without subsampling, nor
    those that reveal in which steps the differing rows took part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from accounting.intervals import Bounds, ByDirection, NoiseBounds, least
from accounting.numerics.calibration import smallest_noise_in_two
from accounting.plan import DpSgdPlan
from accounting.pld import gaussian, poisson_lower_bound, privacy_profile
from accounting.pld.dominating_pairs import Step
from accounting.pld.poisson_lower_bound import Component
from accounting.pld.privacy_profile import Profile

EXACT_METHOD = "Gaussian mechanism, closed form (Balle and Wang 2018)"
_PARTICIPATION = "probability of taking part at all"
#: Below this noise the loss of a step spans so much that closed forms are better.
_LEAST_NOISE = 0.01


def _rates(plan: DpSgdPlan) -> tuple[float, float]:
    """Returns q rounded down and up."""
    exact = plan.sampling_probability
    nearest = float(exact)
    return (
        nearest if nearest <= exact else math.nextafter(nearest, 0.0),
        nearest if nearest >= exact else min(1.0, math.nextafter(nearest, 1.0)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposedSteps:
    """Bounds on Poisson batches for pairs other than those of one example.

    Attributes:
      steps: (q, noise multiplier) -> the pair of one step, in each direction.
      components: q -> the same pair for the lower bound.
      sensitivity: L2 sensitivity of a step's sum, in clip norms.
      num_rows: Number of rows in which neighbours differ, each sampled with
        probability q.
      method: Theorem of the composition.
    """

    steps: Callable[[float, float], tuple[Step, ...]]
    components: Callable[[float], tuple[Component, ...]]
    sensitivity: int
    num_rows: int
    method: str

    def _effective(self, plan: DpSgdPlan, noise_multiplier: float) -> float:
        """Returns the noise multiplier of all steps as one, without subsampling."""
        return noise_multiplier / (self.sensitivity * math.sqrt(plan.num_steps))

    def _participation(self, plan: DpSgdPlan) -> float:
        rate = _rates(plan)[1]
        if rate == 1.0:
            return 1.0
        return -math.expm1(self.num_rows * plan.num_steps * math.log1p(-rate))

    def _composes(self, plan: DpSgdPlan, noise_multiplier: float) -> bool:
        noise = noise_multiplier / self.sensitivity
        return _rates(plan)[1] < 1.0 and _LEAST_NOISE <= noise < math.inf

    def _profile(
        self,
        plan: DpSgdPlan,
        noise_multiplier: float,
        fineness: float = privacy_profile.FINE,
    ) -> Profile:
        return Profile(
            directions=self.steps(_rates(plan)[1], noise_multiplier),
            num_steps=plan.num_steps,
            fineness=fineness,
        )

    def delta(
        self,
        plan: DpSgdPlan,
        noise_multiplier: float,
        epsilon: float,
        fineness: float = privacy_profile.FINE,
    ) -> Bounds:
        """Returns bounds on delta at ``epsilon``.

        Args:
          plan: A plan of Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          epsilon: At least 0.
          fineness: Of the grid of losses; see `privacy_profile.Profile`.
        """
        effective = self._effective(plan, noise_multiplier)
        closed = gaussian.gaussian_delta(effective, epsilon)
        if plan.sampling_probability == 1:
            lower = gaussian.gaussian_delta(effective, epsilon, upper=False)
            return Bounds(upper=closed, lower=lower, method=EXACT_METHOD)
        options = [(closed, EXACT_METHOD), (self._participation(plan), _PARTICIPATION)]
        if self._composes(plan, noise_multiplier):
            profile = self._profile(plan, noise_multiplier, fineness)
            options.insert(0, (profile.delta(epsilon), self.method))
        return least(*options)

    def delta_by_direction(
        self, plan: DpSgdPlan, noise_multiplier: float, epsilon: float
    ) -> ByDirection:
        """Returns the worse direction as both; arguments as for `delta`."""
        both = self.delta(plan, noise_multiplier, epsilon)
        return ByDirection(remove=both, add=both)

    def epsilon(self, plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
        """Returns bounds on epsilon at ``delta``.

        Args:
          plan: A plan of Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          delta: In (0, 1).
        """
        effective = self._effective(plan, noise_multiplier)
        closed = gaussian.gaussian_epsilon(effective, delta)
        if plan.sampling_probability == 1:
            lower = gaussian.gaussian_epsilon(effective, delta, upper=False)
            return Bounds(upper=closed, lower=lower, method=EXACT_METHOD)
        revealed = 0.0 if self._participation(plan) <= delta else math.inf
        options = [(closed, EXACT_METHOD), (revealed, _PARTICIPATION)]
        if self._composes(plan, noise_multiplier):
            found = self._profile(plan, noise_multiplier).epsilon(delta)
            options.insert(0, (found, self.method))
        return least(*options)

    def noise_multiplier(
        self, plan: DpSgdPlan, epsilon: float, delta: float
    ) -> NoiseBounds:
        """Returns a noise multiplier that suffices for ``(epsilon, delta)``.

        Args:
          plan: A plan of Poisson batches.
          epsilon: At least 0.
          delta: In (0, 1).
        """

        def reached(noise: float, fineness: float) -> float:
            return self.delta(plan, noise, epsilon, fineness).guarantee

        value = smallest_noise_in_two(
            reached,
            target=delta,
            guess=float(self.sensitivity),
            coarse=privacy_profile.COARSE,
            fine=privacy_profile.FINE,
            coarse_tolerance=privacy_profile.COARSE / 5,
        )
        return NoiseBounds(sufficient=value, method=self.method)

    def lower_delta(
        self, plan: DpSgdPlan, noise_multiplier: float, epsilon: float
    ) -> float:
        """Returns a lower bound on delta; arguments as for `delta`."""
        if plan.sampling_probability == 1:
            return self.delta(plan, noise_multiplier, epsilon).lower or 0.0
        if not self._composes(plan, noise_multiplier):
            return 0.0
        return poisson_lower_bound.lower_delta_of(
            self.components(_rates(plan)[0]),
            noise_multiplier,
            plan.num_steps,
            epsilon,
        )
