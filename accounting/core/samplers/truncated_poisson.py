"""Truncated Poisson subsampling: a random subset of at most B examples per step.

Several upper bounds hold; the smallest one is used, and the answer names it:

  - Additive: that of Poisson batches, and the cost of the cap; see `truncation`.
  - Mixture: one step is dominated by a public mixture, over the number of other rows
    that are sampled; the example displaces another one if at least B are.
  - Revealed (zero-out): which rows a truncated step keeps is revealed.
  - Closed form: all draws are revealed.  Under zero-out, both data sets keep the same
    rows, and a step's sum has the sensitivity of the rows in which they differ, at most
    B; under add-or-remove twice that, since as many others may be displaced.
  - Participation: ``delta(eps) <= 1 - (1-q)^T``, the probability that the example is
    ever sampled.  If it is not, its presence changes nothing.

`truncated_steps` has the mixture and the revealed rows, for examples and users.  Under
add-or-remove, all hold for data sets of at most n examples, with q fixed.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorem 3.3; Ganesh (2025), arXiv:2508.15089,
  and section 5.3 of Google's "Privacy Loss Distributions", for the mixture of an
  example; there a ghost that displaces another changes the sum by 2 clip norms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from scipy import optimize

from accounting.core import sampler_registry
from accounting.core.intervals import Bounds, ByDirection, NoiseBounds, least
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE, REPLACE_SPECIAL
from accounting.core.numerics import epsilon_after_cost, smallest_noise_in_two
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import gaussian, privacy_profile
from accounting.core.pld.dominating_pairs import Step
from accounting.core.samplers import poisson, truncated_steps
from accounting.core.samplers.poisson import (
    PARTICIPATION,
    ComposedSteps,
    probability,
)
from accounting.core.samplers.truncated_steps import TRUNCATION, truncation_delta

ADDITIVE = "Poisson plus truncation (Chua et al. 2024, Theorem 3.3)"
USER_ADDITIVE = poisson.USER_METHOD + ", plus truncation"
MIXTURE = "truncated mixture (after Ganesh 2025; see truncated_steps)"
USER_MIXTURE = poisson.USER_METHOD + ", which displace others if a step is truncated"
REVEALED = poisson.METHOD + ", with the rows of truncated steps revealed"
USER_REVEALED = poisson.USER_METHOD + ", with the rows of truncated steps revealed"
CLOSED = "Gaussian mechanism in every step, with all draws revealed, closed form"
#: (n, q, B, noise multiplier) -> one step of a mixture in both directions.
_Mixing = Callable[[int, float, int, float], tuple[Step, Step]]
#: A cap that binds with a lower probability needs no mixture in a whole profile.
_NEVER = 1e-10
#: Share of delta that is negligible in a choice between bounds.
_NEGLIGIBLE = 1e-6
#: Relative distance of epsilons in the search for the least delta.
_NEARBY = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedBounds:
    """Upper bounds on truncated Poisson batches, for an example or a user.

    Attributes:
      untruncated: The bounds without the cap.
      additive: Name of the additive bound.
      mixtures: Public mixtures that dominate one step, by name.
      ghosts: Whether ghosts are in the slots of what is absent.
    """

    untruncated: ComposedSteps
    additive: str
    mixtures: dict[str, _Mixing]
    ghosts: bool

    def _profiles(
        self, plan: DpSgdPlan, noise_multiplier: float, fineness: float
    ) -> dict[str, privacy_profile.StepsProfile]:
        """Returns the profiles of the mixtures, none if there is too little noise."""
        if not self.untruncated.composes(plan, noise_multiplier):
            return {}
        size = plan.truncated_batch_size
        assert size is not None
        asked = plan.num_examples, probability(plan), size, noise_multiplier
        return {
            name: privacy_profile.StepsProfile(
                directions=mixing(*asked), num_steps=plan.num_steps, fineness=fineness
            )
            for name, mixing in self.mixtures.items()
        }

    def _effective(self, plan: DpSgdPlan, noise_multiplier: float) -> float:
        """Returns the noise multiplier of all steps as one, with all draws revealed."""
        assert plan.truncated_batch_size is not None
        kept = min(self.untruncated.num_rows, plan.truncated_batch_size)
        sensitivity = kept if self.ghosts else 2 * kept
        return noise_multiplier / (sensitivity * math.sqrt(plan.num_steps))

    def delta(
        self,
        plan: DpSgdPlan,
        noise_multiplier: float,
        epsilon: float,
        fineness: float = privacy_profile.FINE,
    ) -> Bounds:
        """Returns bounds on delta at ``epsilon``.

        Args:
          plan: A plan of truncated Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          epsilon: At least 0.
          fineness: Largest relative addition to a numerical delta; see
            `privacy_profile.StepsProfile`.
        """

        @functools.cache
        def alone(point: float) -> float:
            found = self.untruncated.delta(plan, noise_multiplier, point, fineness)
            return found.guarantee

        def additive(point: float) -> float:
            return min(1.0, alone(point) + truncation_delta(plan, point))

        effective = self._effective(plan, noise_multiplier)
        options = [
            (self.untruncated.participation(plan), PARTICIPATION),
            (gaussian.gaussian_delta(effective, epsilon), CLOSED),
        ]
        cost = truncation_delta(plan, epsilon)
        if cost < 1.0:
            options.insert(0, (additive(epsilon), self.additive))
            if cost <= _NEGLIGIBLE * options[0][0]:
                return least(*options)
        profiles = self._profiles(plan, noise_multiplier, fineness)
        options += [(one.delta(epsilon), name) for name, one in profiles.items()]
        best = least(*options)
        # At a smaller epsilon the cap costs less, but never less than at 0, and without
        # it delta is larger.
        rest = best.guarantee - truncation_delta(plan, 0.0)
        if rest > 0.0 and alone(epsilon) < rest:
            nearby = _least_nearby(additive, epsilon)
            return least((nearby, self.additive), *options)
        return best

    def delta_by_direction(
        self, plan: DpSgdPlan, noise_multiplier: float, epsilon: float
    ) -> ByDirection:
        """Returns bounds on delta in each direction: every theorem holds in each.

        Arguments as for `delta`.
        """
        untruncated = self.untruncated.delta_by_direction(
            plan, noise_multiplier, epsilon
        )
        # What holds for both directions together holds for each.
        both = self.delta(plan, noise_multiplier, epsilon)
        correction = truncation_delta(plan, epsilon)
        profiles: dict[str, privacy_profile.StepsProfile] = {}
        if correction > 0.0:
            profiles = self._profiles(plan, noise_multiplier, privacy_profile.FINE)
        mixtures = {
            name: one.delta_by_direction(epsilon) for name, one in profiles.items()
        }
        remove, add = (
            least(
                (min(1.0, bound.guarantee + correction), self.additive),
                *((deltas[place], name) for name, deltas in mixtures.items()),
                (both.guarantee, both.method),
            )
            for place, bound in enumerate((untruncated.remove, untruncated.add))
        )
        return ByDirection(remove=remove, add=add)

    def profile(
        self, plan: DpSgdPlan, noise_multiplier: float
    ) -> Callable[[float], tuple[float, float]]:
        """Returns a function: epsilon -> upper bounds on delta in each direction.

        Arguments as for `delta`.
        """
        untruncated = self.untruncated.profile(plan, noise_multiplier)
        mixtures: dict[str, privacy_profile.StepsProfile] = {}
        if truncation_delta(plan, 0.0) > _NEVER:
            mixtures = self._profiles(plan, noise_multiplier, privacy_profile.FINE)

        def deltas(epsilon: float) -> tuple[float, float]:
            cost = truncation_delta(plan, epsilon)
            alone = [min(1.0, one + cost) for one in untruncated(epsilon)]
            options = [alone, *(m.shared_deltas(epsilon) for m in mixtures.values())]
            return min(one[0] for one in options), min(one[-1] for one in options)

        return deltas

    def additive_epsilon(
        self, plan: DpSgdPlan, noise_multiplier: float, delta: float
    ) -> float:
        """Returns the epsilon of the additive bound; infinite if there is none.

        Args:
          plan: A plan of truncated Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          delta: In (0, 1).
        """
        if truncation_delta(plan, 0.0) >= delta:
            return math.inf
        needed_at = self.untruncated.epsilon_function(plan, noise_multiplier, delta)
        cost = functools.partial(truncation_delta, plan)
        return epsilon_after_cost(cost, lambda point: needed_at(point).guarantee, delta)

    def epsilon(self, plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
        """Returns bounds on epsilon at ``delta``; arguments as for `delta`."""
        if self.untruncated.participation(plan) <= delta:
            return Bounds(upper=0.0, method=PARTICIPATION)
        additive = self.additive_epsilon(plan, noise_multiplier, delta)
        if additive < math.inf and truncation_delta(plan, additive) <= 1e-5 * delta:
            return Bounds(upper=additive, method=self.additive)
        effective = self._effective(plan, noise_multiplier)
        profiles = self._profiles(plan, noise_multiplier, privacy_profile.FINE)
        return least(
            (additive, self.additive),
            *((one.epsilon(delta), name) for name, one in profiles.items()),
            (gaussian.gaussian_epsilon(effective, delta), CLOSED),
        )

    def noise_multiplier(
        self, plan: DpSgdPlan, epsilon: float, delta: float
    ) -> NoiseBounds:
        """Returns a noise multiplier that suffices for ``(epsilon, delta)``.

        Args:
          plan: A plan of truncated Poisson batches.
          epsilon: At least 0.
          delta: In (0, 1).
        """

        def reached(noise: float, fineness: float) -> float:
            return self.delta(plan, noise, epsilon, fineness).guarantee

        value = smallest_noise_in_two(
            reached,
            target=delta,
            guess=float(self.untruncated.num_rows),
            coarse=privacy_profile.COARSE,
            fine=privacy_profile.FINE,
            coarse_tolerance=privacy_profile.COARSE / 5,
        )
        method = next(iter(self.mixtures), self.additive)
        return NoiseBounds(sufficient=value, method=method)


def _least_nearby(total: Callable[[float], float], epsilon: float) -> float:
    """Returns the least value of ``total`` at any epsilon up to ``epsilon``.

    The correction rises with epsilon, but delta does not: a bound at one epsilon holds
    at every larger one.

    Args:
      total: Epsilon -> an additive bound.
      epsilon: At least 0.
    """
    found = total(epsilon)
    if total(epsilon * (1 - _NEARBY)) < found:
        best = optimize.minimize_scalar(
            lambda point: math.log(total(point)),
            bounds=(0.0, epsilon),
            method="bounded",
            options={"xatol": _NEARBY * epsilon},
        )
        found = min(found, total(float(best.x)))
    return found


def bounds_of(count: int, *, ghosts: bool) -> TruncatedBounds:
    """Returns the bounds for an example, or for a user with several.

    Args:
      count: Number of the user's examples; 1 for an example.
      ghosts: Whether ghosts are in the slots of what is absent.
    """
    one = count == 1
    displaced = functools.partial(truncated_steps.displaced_steps, count, ghosts)
    mixtures: dict[str, _Mixing] = {MIXTURE if one else USER_MIXTURE: displaced}
    if ghosts:
        revealed = functools.partial(truncated_steps.revealed_steps, count)
        mixtures[REVEALED if one else USER_REVEALED] = revealed
    return TruncatedBounds(
        untruncated=poisson.OF_EXAMPLE if one else poisson.of_user(count),
        additive=ADDITIVE if one else USER_ADDITIVE,
        mixtures=mixtures,
        ghosts=ghosts,
    )


def _of(
    base: sampler_registry.Sampler, found: TruncatedBounds
) -> sampler_registry.Sampler:
    return dataclasses.replace(
        base,
        epsilon=found.epsilon,
        delta=found.delta,
        noise_multiplier=found.noise_multiplier,
        delta_by_direction=found.delta_by_direction,
        profile=found.profile,
    )


def _of_users(
    base: sampler_registry.Sampler, ghosts: bool, count: int
) -> sampler_registry.Sampler:
    """Returns the `Sampler` for users with at most ``count`` examples."""
    found = _of(base, bounds_of(count, ghosts=ghosts))
    return dataclasses.replace(found, delta_by_direction=None)


OF_EXAMPLE = bounds_of(1, ghosts=True)
OF_ADDED = bounds_of(1, ghosts=False)
_WORDING = sampler_registry.Wording(
    sampling="Poisson subsampling, each example in each step independently; a step "
    "with more than truncated_batch_size examples keeps a uniformly random subset",
    discretization=poisson.DISCRETIZATION,
)
_ZERO_OUT = sampler_registry.Sampler(
    epsilon=OF_EXAMPLE.epsilon,
    delta=OF_EXAMPLE.delta,
    noise_multiplier=OF_EXAMPLE.noise_multiplier,
    closed_form=False,
    relations=(REPLACE_SPECIAL, ADD_OR_REMOVE_ONE),
    delta_by_direction=OF_EXAMPLE.delta_by_direction,
    profile=OF_EXAMPLE.profile,
    poisson_rate=probability,
    truncation=TRUNCATION,
    wording=_WORDING,
)
_ADD_OR_REMOVE = dataclasses.replace(
    _of(_ZERO_OUT, OF_ADDED),
    wording=dataclasses.replace(
        _WORDING,
        num_examples="num_examples is a public upper bound on the number of "
        "examples, independent of the data",
    ),
)
SAMPLER = dataclasses.replace(
    _ZERO_OUT,
    users=functools.partial(_of_users, _ZERO_OUT, True),
    under={
        ADD_OR_REMOVE_ONE: dataclasses.replace(
            _ADD_OR_REMOVE, users=functools.partial(_of_users, _ADD_OR_REMOVE, False)
        )
    },
)
