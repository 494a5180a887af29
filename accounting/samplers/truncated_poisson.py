"""Truncated Poisson subsampling: a random subset of at most B examples per step.

Three upper bounds hold; the smallest one is used, and the answer names it:

  - Additive: ``delta(eps) <= delta_Poisson(eps) + (1 + e^eps) T Pr[Bin(n, q) > B]``.
    Couple the truncated sampler with the untruncated one.  They differ with probability
    at most ``eta = T Pr[Bin(n, q) > B]`` on either data set, so
    ``Pr[M(D) in S] <= Pr[M_P(D) in S] + eta <= e^eps Pr[M_P(D') in S] + delta_P + eta
    <= e^eps (Pr[M(D') in S] + eta) + delta_P + eta``.
  - Mixture: one step is dominated by the public mixture of the Poisson pair (if fewer
    than B other examples are sampled) and of a subsampled pair of twice the sensitivity
    (if at least B are: the example then displaces another one).
  - Participation: ``delta(eps) <= 1 - (1-q)^T``, the probability that the example is
    ever sampled.  If it is not, its presence changes nothing.

Under add-or-remove, all hold for data sets of at most n examples, with q fixed.  If
M >= B others are sampled, the example x displaces another example y with probability
``r = q B / (M + 1)``: the pair is ``((1-r) N(y) + r N(x), N(y))``, with x and y at a
distance of at most 2.  Since r <= q, and since this pair at r = q dominates the Poisson
pair, delta increases with the probability of M >= B, and so with the number of
examples: the bound at n holds for every smaller number.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorem 3.3; Ganesh (2025), arXiv:2508.15089,
  and section 5.3 of Google's "Privacy Loss Distributions".
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from scipy import optimize, special

from accounting import sampler_registry
from accounting.intervals import Bounds, ByDirection, NoiseBounds, least
from accounting.neighboring_relation import ADD_OR_REMOVE_ONE, REPLACE_SPECIAL
from accounting.numerics.calibration import epsilon_after_cost, smallest_noise_in_two
from accounting.plan import DpSgdPlan
from accounting.pld import (
    dominating_pairs,
    gaussian,
    poisson_lower_bound,
    privacy_profile,
)
from accounting.pld.dominating_pairs import Step
from accounting.samplers import audit_case, kept_rows, poisson
from accounting.samplers.audit_case import Case
from accounting.samplers.composed_steps import PARTICIPATION, probability
from accounting.validation import check_int

ADDITIVE = "Poisson plus truncation (Chua et al. 2024, Theorem 3.3)"
USER_ADDITIVE = poisson.USER_METHOD + ", plus truncation"
USER_LOWER_METHOD = poisson.USER_LOWER_METHOD + ", as many as are kept"
MIXTURE = "truncated mixture (Ganesh 2025)"
CLOSED = "Gaussian mechanism of twice the sensitivity in every step, closed form"
LOWER_METHOD = poisson.LOWER_METHOD + " at the probability of being kept"
_UNTRUNCATED = poisson.OF_EXAMPLE
#: (n, q, B, noise multiplier) -> one step of a mixture in both directions.
_Mixing = Callable[[int, float, int, float], tuple[Step, Step]]
#: Largest share of a target delta for truncation by `smallest_cap`.
_SHARE_OF_DELTA = 1e-5
#: Share of delta that is negligible in a choice between bounds.
_NEGLIGIBLE = 1e-6
#: Relative distance of epsilons in the search for the least delta.
_NEARBY = 1e-3
#: At less noise, the range of a step's loss exceeds the lower bound's grid.
_LEAST_USER_NOISE = 0.01
#: Factor that covers the relative error of the incomplete beta function.
_TAIL_SLACK = 1 + 1e-9


def tail_probability(
    num_trials: int, sampling_probability: float, threshold: int
) -> float:
    """Returns ``Pr[Bin(num_trials, sampling_probability) > threshold]``, rounded up.

    Args:
      num_trials: At least 1.
      sampling_probability: In (0, 1].
      threshold: Any integer.
    """
    if threshold >= num_trials:
        return 0.0
    if threshold < 0:
        return 1.0
    tail = special.betainc(threshold + 1, num_trials - threshold, sampling_probability)
    return min(1.0, float(tail) * _TAIL_SLACK)


def truncation_probability(plan: DpSgdPlan) -> float:
    """Returns the probability that one given step is truncated."""
    assert plan.truncated_batch_size is not None
    return tail_probability(
        plan.num_examples, probability(plan), plan.truncated_batch_size
    )


def any_truncation_probability(plan: DpSgdPlan) -> float:
    """Returns a bound on the probability that any step is truncated; 0 without a cap.

    No probability differs by more from its value under untruncated sampling.
    """
    if plan.truncated_batch_size is None:
        return 0.0
    return min(1.0, plan.num_steps * truncation_probability(plan))


def truncation_delta(plan: DpSgdPlan, epsilon: float) -> float:
    """Returns ``(1 + e^epsilon) T Pr[Bin(n, q) > B]``, the additive correction.

    Args:
      plan: A plan of truncated Poisson batches, with cap B.
      epsilon: At least 0.
    """
    truncated = truncation_probability(plan)
    if truncated == 0.0:
        return 0.0
    exponent = epsilon + math.log1p(math.exp(-epsilon)) + math.log(truncated)
    return math.exp(min(exponent + math.log(plan.num_steps), 700.0))


def _additive(
    plan: DpSgdPlan, untruncated: Callable[[float], float], epsilon: float
) -> float:
    """Returns the least additive bound at any epsilon up to ``epsilon``.

    The correction rises with epsilon, but delta does not: a bound at one epsilon holds
    at every larger one.

    Args:
      plan: A plan of truncated Poisson batches.
      untruncated: Epsilon -> an upper bound on delta without the cap.
      epsilon: At least 0.
    """

    def total(point: float) -> float:
        return untruncated(point) + truncation_delta(plan, point)

    found = total(epsilon)
    # No smaller epsilon gains more than the correction.
    if truncation_delta(plan, epsilon) <= _NEGLIGIBLE * found:
        return min(1.0, found)
    if total(epsilon * (1 - _NEARBY)) < found:
        best = optimize.minimize_scalar(
            lambda point: math.log(total(point)),
            bounds=(0.0, epsilon),
            method="bounded",
            options={"xatol": _NEARBY * epsilon},
        )
        found = min(found, total(float(best.x)))
    return min(1.0, found)


def adding_steps(
    num_examples: int,
    sampling_probability: float,
    truncated_batch_size: int,
    noise_multiplier: float,
) -> tuple[Step, Step]:
    """Returns one step under add-or-remove; arguments as for `mixture_steps`.

    Args:
      num_examples: n, upper bound on the number of examples.
      sampling_probability: q, in (0, 1).
      truncated_batch_size: B.
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
    """
    rate = sampling_probability
    crowded = tail_probability(num_examples - 1, rate, truncated_batch_size - 1)
    alone = poisson.steps(rate, noise_multiplier)
    if crowded == 0.0:
        return alone
    # Twice the sensitivity is half the noise.
    evicting = poisson.steps(rate, noise_multiplier / 2)
    remove, add = (
        [(1 - crowded, one[0][1]), (crowded, two[0][1])]
        for one, two in zip(alone, evicting, strict=True)
    )
    return remove, add


def mixture_steps(
    num_examples: int,
    sampling_probability: float,
    truncated_batch_size: int,
    noise_multiplier: float,
) -> tuple[Step, Step]:
    """Returns one step of the mixture in both directions, remove first.

    Args:
      num_examples: n.
      sampling_probability: q, in (0, 1).
      truncated_batch_size: B.
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
    """
    rate, size = sampling_probability, truncated_batch_size
    remove, add = poisson.steps(rate, noise_multiplier)
    crowded = tail_probability(num_examples - 1, rate, size - 1)
    if crowded == 0.0:
        return remove, add
    truncated = tail_probability(num_examples, rate, size)
    # The slack rounds up the ratio of two tails.  Twice the sensitivity is half the
    # noise.
    kept = min(1.0, truncated * size / (num_examples * crowded) * _TAIL_SLACK)
    evicting = dominating_pairs.replace_pair(kept, noise_multiplier / 2)
    return (
        [(1 - crowded, remove[0][1]), (crowded, evicting)],
        [(1 - crowded, add[0][1]), (crowded, evicting)],
    )


def _mixture(
    mixing: _Mixing,
    plan: DpSgdPlan,
    noise_multiplier: float,
    fineness: float = privacy_profile.FINE,
) -> privacy_profile.Profile:
    """Returns the profile of the mixture."""
    rate, size = probability(plan), plan.truncated_batch_size
    assert size is not None
    return privacy_profile.Profile(
        directions=mixing(plan.num_examples, rate, size, noise_multiplier),
        num_steps=plan.num_steps,
        fineness=fineness,
    )


def delta(
    plan: DpSgdPlan,
    noise_multiplier: float,
    epsilon: float,
    fineness: float = privacy_profile.FINE,
    mixing: _Mixing = mixture_steps,
) -> Bounds:
    """Returns bounds on delta at ``epsilon``.

    Args:
      plan: A plan of truncated Poisson batches.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      epsilon: At least 0.
      fineness: Largest relative addition to a numerical delta; see
        `privacy_profile.Profile`.
      mixing: `mixture_steps`, or `adding_steps` under add-or-remove.
    """
    additive = _additive(
        plan,
        lambda point: (
            _UNTRUNCATED.delta(plan, noise_multiplier, point, fineness).guarantee
        ),
        epsilon,
    )
    revealed = _UNTRUNCATED.participation(plan), PARTICIPATION
    if truncation_delta(plan, epsilon) <= _NEGLIGIBLE * additive:
        return least((additive, ADDITIVE), revealed)
    if _can_mix(plan, noise_multiplier):
        profile = _mixture(mixing, plan, noise_multiplier, fineness)
        other = profile.delta(epsilon), MIXTURE
    else:
        noise = _closed_noise(plan, noise_multiplier)
        other = gaussian.gaussian_delta(noise, epsilon), CLOSED
    return least((additive, ADDITIVE), other, revealed)


def delta_by_direction(
    plan: DpSgdPlan,
    noise_multiplier: float,
    epsilon: float,
    mixing: _Mixing = mixture_steps,
) -> ByDirection:
    """Returns bounds on delta in each direction; both theorems hold in each.

    Arguments as for `delta`.
    """
    untruncated = _UNTRUNCATED.delta_by_direction(plan, noise_multiplier, epsilon)
    correction = truncation_delta(plan, epsilon)
    mixtures: tuple[float, ...] = (1.0, 1.0)
    if correction > 0.0 and _can_mix(plan, noise_multiplier):
        profile = _mixture(mixing, plan, noise_multiplier)
        mixtures = profile.delta_by_direction(epsilon)
    revealed = _UNTRUNCATED.participation(plan), PARTICIPATION
    remove, add = (
        least(
            (min(1.0, bound.guarantee + correction), ADDITIVE),
            (mixture, MIXTURE),
            revealed,
        )
        for bound, mixture in zip(
            (untruncated.remove, untruncated.add), mixtures, strict=True
        )
    )
    return ByDirection(remove=remove, add=add)


def _closed_noise(plan: DpSgdPlan, noise_multiplier: float) -> float:
    # Given the sampled examples and the order of eviction, one example changes the sum
    # of each step by at most twice the clip norm.
    return noise_multiplier / (2 * math.sqrt(plan.num_steps))


def _can_mix(plan: DpSgdPlan, noise_multiplier: float) -> bool:
    return _UNTRUNCATED.composes(plan, noise_multiplier / 2)


def additive_epsilon(plan: DpSgdPlan, noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of the additive bound; infinite if there is none.

    Args:
      plan: A plan of truncated Poisson batches.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      delta: In (0, 1).
    """
    needed_at = _UNTRUNCATED.epsilon_function(plan, noise_multiplier, delta)
    cost = functools.partial(truncation_delta, plan)
    return epsilon_after_cost(cost, lambda point: needed_at(point).guarantee, delta)


def epsilon(
    plan: DpSgdPlan,
    noise_multiplier: float,
    delta: float,
    mixing: _Mixing = mixture_steps,
) -> Bounds:
    """Returns bounds on epsilon at ``delta``; arguments as for `delta`."""
    if _UNTRUNCATED.participation(plan) <= delta:
        return Bounds(upper=0.0, method=PARTICIPATION)
    additive = additive_epsilon(plan, noise_multiplier, delta)
    if not _can_mix(plan, noise_multiplier):
        closed = gaussian.gaussian_epsilon(_closed_noise(plan, noise_multiplier), delta)
        return least((additive, ADDITIVE), (closed, CLOSED))
    if additive < math.inf and truncation_delta(plan, additive) <= 1e-5 * delta:
        return Bounds(upper=additive, method=ADDITIVE)
    mixture = _mixture(mixing, plan, noise_multiplier).epsilon(delta)
    return least((additive, ADDITIVE), (mixture, MIXTURE))


def smallest_cap(plan: DpSgdPlan, epsilon: float, delta: float) -> int:
    """Returns the least B whose additive correction is at most 1e-5 of ``delta``.

    Args:
      plan: A plan of Poisson batches.
      epsilon: At least 0.
      delta: In (0, 1).

    Example:
      >>> smallest_cap(
      ...     DpSgdPlan(sampler="poisson", num_examples=36_800_000,
      ...               expected_batch_size=65_536, num_steps=562), 5.0, 2.7e-8)
      67754
    """
    rate = probability(plan)
    allowed = math.log(_SHARE_OF_DELTA) + math.log(delta) - math.log(plan.num_steps)
    allowed -= epsilon + math.log1p(math.exp(-epsilon))

    def is_enough(size: int) -> bool:
        tail = tail_probability(plan.num_examples, rate, size)
        return tail == 0.0 or math.log(tail) <= allowed

    sizes = range(plan.expected_batch_size, plan.num_examples)
    return sizes.start + bisect.bisect_left(sizes, True, key=is_enough)


def noise_multiplier(
    plan: DpSgdPlan, epsilon: float, delta: float, mixing: _Mixing = mixture_steps
) -> NoiseBounds:
    """Returns a noise multiplier that suffices for ``(epsilon, delta)``.

    Args:
      plan: A plan of truncated Poisson batches.
      epsilon: At least 0.
      delta: In (0, 1).
      mixing: As for `delta`.
    """
    value = smallest_noise_in_two(
        lambda noise, fineness: _delta(plan, noise, epsilon, fineness, mixing),
        target=delta,
        guess=_UNTRUNCATED.guess(plan, epsilon, delta),
        coarse=privacy_profile.COARSE,
        fine=privacy_profile.FINE,
        coarse_tolerance=privacy_profile.COARSE / 5,
    )
    return NoiseBounds(sufficient=value, method=MIXTURE)


def _delta(
    plan: DpSgdPlan,
    noise_multiplier: float,
    epsilon: float,
    fineness: float,
    mixing: _Mixing,
) -> float:
    # ``delta`` is an argument's name above.
    return delta(plan, noise_multiplier, epsilon, fineness, mixing).guarantee


def lower_delta(plan: DpSgdPlan, noise_multiplier: float, epsilon: float) -> float:
    """Returns a lower bound on delta at ``epsilon``; takes about a second.

    It is delta of the data set whose other gradients are zero, where evicting another
    example has no effect.  Arguments as for `delta`.
    """
    rate = kept_probability(plan)
    return _UNTRUNCATED.lower_delta_at(rate, plan.num_steps, noise_multiplier, epsilon)


def kept_probability(plan: DpSgdPlan) -> float:
    """Returns the probability that an example is sampled and kept, rounded down.

    ``E[min(K, B)] / n = q Pr[Bin(n-1, q) < B] + Pr[K > B] B / n`` for K = Bin(n, q).
    """
    size = plan.truncated_batch_size
    assert size is not None
    # It increases with q.
    rate = math.nextafter(float(plan.sampling_probability), 0.0)
    crowded = tail_probability(plan.num_examples - 1, rate, size - 1)
    truncated = tail_probability(plan.num_examples, rate, size) / _TAIL_SLACK**2
    kept = rate * (1 - crowded) + truncated * size / plan.num_examples
    return max(0.0, kept * (1 - 1e-14))


def worst_case(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the data set of an audit: all rows, or a few without the cap.

    Omitting the cap changes any probability by at most the probability that any step is
    truncated.

    Args:
      plan: The audited plan.
      canary_rows: Number of rows of the canary.

    Raises:
      InputError: the data set has fewer rows than the canary.
    """
    check_int("canary_rows", canary_rows, at_least=1, at_most=plan.num_examples)
    drawn = max(plan.num_examples, plan.expected_batch_size * plan.num_steps)
    if drawn <= audit_case.MOST_ROWS:
        rows = plan.num_examples
        sizes = audit_case.two_blocks(rows)
        first = (rows - canary_rows + 1) // 2
        return Case(plan=plan, block_rows=sizes, canary=first, canary_rows=canary_rows)
    slack = any_truncation_probability(plan)
    return dataclasses.replace(
        audit_case.own_block(TRUNCATION.without(plan), canary_rows),
        slack=slack,
        scaled=(
            f"steps are not truncated at {plan.truncated_batch_size:,} examples; they "
            f"would be with probability {slack:.1g} or less, which is taken off"
        ),
    )


def event(dp_accounting: Any, plan: DpSgdPlan, noise_multiplier: float) -> Any:
    """Returns the ``DpEvent`` of a run; None before dp_accounting 0.6.

    Args:
      dp_accounting: The package of this name.
      plan: A plan of truncated Poisson batches.
      noise_multiplier: Noise standard deviation over the clip norm.
    """
    step = getattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent", None)
    if step is None:
        return None
    return dp_accounting.SelfComposedDpEvent(
        step(
            plan.num_examples,
            probability(plan),
            plan.truncated_batch_size,
            noise_multiplier,
        ),
        plan.num_steps,
    )


@dataclasses.dataclass(frozen=True)
class _Users:
    """The additive bound for a user with ``count`` examples.

    The coupling of the module docstring holds: with or without the user's examples,
    truncation changes a step only if the untruncated draw exceeds B.
    """

    count: int

    def delta(
        self,
        plan: DpSgdPlan,
        noise_multiplier: float,
        epsilon: float,
        fineness: float = privacy_profile.FINE,
    ) -> Bounds:
        """Returns an upper bound on delta at ``epsilon``; arguments as for `delta`."""
        composed = poisson.of_user(self.count)
        additive = _additive(
            plan,
            lambda point: (
                composed.delta(plan, noise_multiplier, point, fineness).guarantee
            ),
            epsilon,
        )
        noise = _closed_noise(plan, noise_multiplier) / self.count
        closed = gaussian.gaussian_delta(noise, epsilon)
        revealed = composed.participation(plan), PARTICIPATION
        return least((additive, USER_ADDITIVE), (closed, CLOSED), revealed)

    def epsilon(self, plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
        """Returns an upper bound on epsilon at ``delta``; arguments as for `delta`."""
        composed = poisson.of_user(self.count)
        if composed.participation(plan) <= delta:
            return Bounds(upper=0.0, method=PARTICIPATION)
        additive = epsilon_after_cost(
            functools.partial(truncation_delta, plan),
            lambda point: composed.epsilon(plan, noise_multiplier, point).guarantee,
            delta,
        )
        noise = _closed_noise(plan, noise_multiplier) / self.count
        closed = gaussian.gaussian_epsilon(noise, delta)
        return least((additive, USER_ADDITIVE), (closed, CLOSED))

    def lower_delta(
        self, plan: DpSgdPlan, noise_multiplier: float, epsilon: float
    ) -> float:
        """Returns a lower bound on delta, on the data set of `lower_delta`.

        Args:
          plan: A plan of truncated Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          epsilon: At least 0.
        """
        if noise_multiplier < _LEAST_USER_NOISE * self.count:
            return 0.0
        return poisson_lower_bound.lower_delta_of(
            kept_rows.components(plan, self.count),
            noise_multiplier,
            plan.num_steps,
            epsilon,
        )

    def noise_multiplier(
        self, plan: DpSgdPlan, epsilon: float, delta: float
    ) -> NoiseBounds:
        """Returns the noise for ``delta``; arguments as for `noise_multiplier`."""
        value = smallest_noise_in_two(
            lambda noise, fineness: (
                self.delta(plan, noise, epsilon, fineness).guarantee
            ),
            target=delta,
            guess=float(self.count),
            coarse=privacy_profile.COARSE,
            fine=privacy_profile.FINE,
            coarse_tolerance=privacy_profile.COARSE / 5,
        )
        return NoiseBounds(sufficient=value, method=USER_ADDITIVE)


def of_users(count: int) -> sampler_registry.Sampler:
    """Returns the `Sampler` for users with at most ``count`` examples."""
    found = _Users(count)
    return dataclasses.replace(
        _ZERO_OUT,
        epsilon=found.epsilon,
        delta=found.delta,
        noise_multiplier=found.noise_multiplier,
        delta_by_direction=None,
        lower_bound=sampler_registry.LowerBound(
            delta=found.lower_delta, method=USER_LOWER_METHOD
        ),
        event=None,
        audit=audit_case.Audit(
            worst_case=functools.partial(worst_case, canary_rows=count),
            score=poisson.user_score(count),
        ),
    )


TRUNCATION = sampler_registry.Truncation(
    untruncated="poisson", delta=truncation_delta, smallest_cap=smallest_cap
)
_WORDING = sampler_registry.Wording(
    sampling="Poisson subsampling, each example in each step independently; a step "
    "with more than truncated_batch_size examples keeps a uniformly random subset",
    discretization=poisson.DISCRETIZATION,
)
_ZERO_OUT = sampler_registry.Sampler(
    epsilon=epsilon,
    delta=delta,
    noise_multiplier=noise_multiplier,
    closed_form=False,
    relations=(REPLACE_SPECIAL, ADD_OR_REMOVE_ONE),
    delta_by_direction=delta_by_direction,
    lower_bound=sampler_registry.LowerBound(delta=lower_delta, method=LOWER_METHOD),
    poisson_rate=probability,
    truncation=TRUNCATION,
    event=sampler_registry.Event(build=event, relation=REPLACE_SPECIAL, tight=False),
    wording=_WORDING,
    audit=audit_case.Audit(worst_case=worst_case, score=poisson.score),
)
SAMPLER = dataclasses.replace(
    _ZERO_OUT,
    users=of_users,
    under={
        ADD_OR_REMOVE_ONE: dataclasses.replace(
            _ZERO_OUT,
            epsilon=functools.partial(epsilon, mixing=adding_steps),
            delta=functools.partial(delta, mixing=adding_steps),
            noise_multiplier=functools.partial(noise_multiplier, mixing=adding_steps),
            delta_by_direction=functools.partial(
                delta_by_direction, mixing=adding_steps
            ),
            event=sampler_registry.Event(
                build=event,
                relation=ADD_OR_REMOVE_ONE,
                tight=False,
            ),
            wording=dataclasses.replace(
                _WORDING,
                num_examples="num_examples is a public upper bound on the number of "
                "examples, independent of the data",
            ),
        )
    },
)
