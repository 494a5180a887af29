"""T independent steps of given dominating pairs.

Formal guarantees:
  - ``delta(...).upper`` and ``epsilon(...).upper`` bound both directions from above:
    discretisation, truncation and rounding are added on the private side.
  - They never exceed the bounds of the Gaussian mechanism without subsampling, nor
    those that reveal in which steps the differing rows took part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

from accounting.core.intervals import Bounds, ByDirection, NoiseBounds, least
from accounting.core.numerics import smallest_noise_in_two
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import gaussian, privacy_profile
from accounting.core.pld.dominating_pairs import Step
from accounting.core.pld.inversion import LaplaceSum
from accounting.core.pld.privacy_profile import Chernoff, StepsProfile

EXACT_METHOD = "Gaussian mechanism, closed form (Balle and Wang 2018)"
PARTICIPATION = "probability of taking part at all"
#: More than the relative rounding error of a few operations.
_SLACK = 1e-15


def probability(plan: DpSgdPlan) -> float:
    """Returns the sampling probability, rounded up, which is less private."""
    return rounded_up(plan.sampling_probability)


def rounded_up(exact: Fraction) -> float:
    """Returns a probability as a float, rounded up."""
    rounded = float(exact)
    return rounded if rounded >= exact else min(1.0, math.nextafter(rounded, 1.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposedSteps:
    """Bounds on Poisson batches, given the dominating pair of one step.

    Attributes:
      steps: (q, noise multiplier) -> the pair of one step, in each direction.
      sensitivity: L2 sensitivity of a step's sum, in clip norms.
      num_rows: Number of rows in which neighbours differ, each sampled with
        probability q.
      method: Theorem of the composition.
      least_noise: Noise multiplier below which there are only closed forms, because the
        loss of a step spans too much for a grid.
      symmetric: Whether both directions have the same pair.
    """

    steps: Callable[[float, float], tuple[Step, ...]]
    sensitivity: int
    num_rows: int
    method: str
    least_noise: float
    symmetric: bool = False

    def _effective(self, plan: DpSgdPlan, noise_multiplier: float) -> float:
        """Returns the noise multiplier of all steps as one, without subsampling."""
        return noise_multiplier / (self.sensitivity * math.sqrt(plan.num_steps))

    def _log_never(self, plan: DpSgdPlan) -> float:
        """Returns ln of the probability that no row is ever sampled, rounded down."""
        rate = probability(plan)
        if rate == 1.0:
            return -math.inf
        exponent = self.num_rows * plan.num_steps * math.log1p(-rate)
        return exponent * (1 + _SLACK)

    def participation(self, plan: DpSgdPlan) -> float:
        """Returns the probability that any row is ever sampled, rounded up.

        No delta exceeds it: without any of the rows, both data sets have the same
        outputs.  Without noise it is delta of removing the rows.
        """
        return min(1.0, -math.expm1(self._log_never(plan)) * (1 + _SLACK))

    def _added(self, plan: DpSgdPlan, epsilon: float) -> float:
        """Returns delta of adding the rows, if their participation is revealed."""
        shifted = epsilon * (1 - _SLACK) + self._log_never(plan)
        return -math.expm1(min(0.0, shifted)) * (1 + _SLACK)

    def composes(self, plan: DpSgdPlan, noise_multiplier: float) -> bool:
        """Returns whether losses are composed numerically, beside closed forms.

        Args:
          plan: A plan of Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
        """
        enough = self.least_noise <= noise_multiplier < math.inf
        return enough and probability(plan) < 1.0

    def _profile(
        self,
        plan: DpSgdPlan,
        noise_multiplier: float,
        fineness: float = privacy_profile.FINE,
    ) -> StepsProfile:
        return StepsProfile(
            directions=self.steps(probability(plan), noise_multiplier),
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
          fineness: Largest relative addition to a numerical delta; see
            `privacy_profile.StepsProfile`.
        """
        effective = self._effective(plan, noise_multiplier)
        closed = gaussian.gaussian_delta(effective, epsilon)
        if plan.sampling_probability == 1:
            lower = gaussian.gaussian_delta(effective, epsilon, upper=False)
            return Bounds(upper=closed, lower=lower, method=EXACT_METHOD)
        options = [(closed, EXACT_METHOD), (self.participation(plan), PARTICIPATION)]
        if self.composes(plan, noise_multiplier):
            profile = self._profile(plan, noise_multiplier, fineness)
            options.insert(0, (profile.delta(epsilon), self.method))
        return least(*options)

    def delta_by_direction(
        self, plan: DpSgdPlan, noise_multiplier: float, epsilon: float
    ) -> ByDirection:
        """Returns bounds on delta in each direction; arguments as for `delta`."""
        if self.symmetric or plan.sampling_probability == 1:
            both = self.delta(plan, noise_multiplier, epsilon)
            return ByDirection(remove=both, add=both)
        effective = self._effective(plan, noise_multiplier)
        closed = gaussian.gaussian_delta(effective, epsilon)
        revealed_deltas = self.participation(plan), self._added(plan, epsilon)
        numerical: tuple[float, ...] = (1.0, 1.0)
        if self.composes(plan, noise_multiplier):
            numerical = self._profile(plan, noise_multiplier).delta_by_direction(
                epsilon
            )
        remove, add = (
            least(
                (value, self.method), (closed, EXACT_METHOD), (revealed, PARTICIPATION)
            )
            for value, revealed in zip(numerical, revealed_deltas, strict=True)
        )
        return ByDirection(remove=remove, add=add)

    def profile(
        self, plan: DpSgdPlan, noise_multiplier: float
    ) -> Callable[[float], tuple[float, float]]:
        """Returns a function: epsilon -> upper bounds on delta in each direction.

        It is fast where it is asked for very many epsilons.

        Args:
          plan: A plan of Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
        """
        effective = self._effective(plan, noise_multiplier)
        composes = self.composes(plan, noise_multiplier)
        found = self._profile(plan, noise_multiplier) if composes else None

        def deltas(epsilon: float) -> tuple[float, float]:
            closed = gaussian.gaussian_delta(effective, epsilon)
            remove = self.participation(plan)
            add = remove if self.symmetric else self._added(plan, epsilon)
            numerical = (1.0,) if found is None else found.shared_deltas(epsilon)
            return min(closed, remove, numerical[0]), min(closed, add, numerical[-1])

        return deltas

    def epsilon(self, plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
        """Returns bounds on epsilon; arguments as for `epsilon_function`."""
        found = self.epsilon_function(plan, noise_multiplier, delta)(delta)
        if plan.sampling_probability < 1:
            return found
        effective = self._effective(plan, noise_multiplier)
        lower = gaussian.gaussian_epsilon(effective, delta, upper=False)
        return dataclasses.replace(found, lower=lower)

    def epsilon_function(
        self, plan: DpSgdPlan, noise_multiplier: float, delta: float
    ) -> Callable[[float], Bounds]:
        """Returns a function: delta -> an upper bound on epsilon.

        The numerical part is computed once, and is tight near ``delta``.

        Args:
          plan: A plan of Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          delta: In (0, 1).
        """
        effective = self._effective(plan, noise_multiplier)
        participation = self.participation(plan)
        sums: tuple[LaplaceSum | Chernoff, ...] = ()
        if self.composes(plan, noise_multiplier):
            sums = self._profile(plan, noise_multiplier).sums_at(delta)

        def upper(point: float) -> Bounds:
            options = [(gaussian.gaussian_epsilon(effective, point), EXACT_METHOD)]
            if participation <= point:
                options.append((0.0, PARTICIPATION))
            if sums:
                options.append((privacy_profile.epsilon_of(sums, point), self.method))
            return least(*options)

        return upper

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
