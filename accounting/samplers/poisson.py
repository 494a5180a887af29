"""Poisson subsampling: each example is in each step independently with probability q.

Under the zero-out relation (an example is replaced by a ghost that contributes zero),
T steps are tightly dominated, in each direction, by the T-fold composition of the pair
``((1-q) N(0, s^2) + q N(1, s^2), N(0, s^2))`` or its reverse.

Under replace-one the tightly dominating pair of a step is
``P = (1-q) N(0, s^2) + q N(1, s^2)`` against ``Q = (1-q) N(0, s^2) + q N(-1, s^2)``,
which equals its reverse.  Let gradients u and v of norms a, b <= 1 be exchanged.  For
k >= 1 and ``c = (1-q)(k-1)``, densities relative to N(0, s^2 I) give the
hockey-stick divergence ``E[(q X - k q Y - c)+]``, where X and Y are exponential
martingales of a Gaussian with variances a^2/s^2 and b^2/s^2 and covariance <u, v>/s^2:
the price of a spread option.  The payoff g is convex with
g_XY <= 0, and changes dA, dB of the variances and dC of the covariance move the mean by
``E[X^2 g_XX dA + Y^2 g_YY dB] / 2 + E[X Y g_XY dC]``.  So it grows as <u, v> falls to
-ab, and then with a and b up to 1.  For k < 1 exchange P and Q.

Formal guarantees:
  - ``delta(...).upper`` and ``epsilon(...).upper`` are true bounds for both directions:
    discretisation, truncation and rounding are all added on the private side.
  - They never exceed the bounds of the Gaussian mechanism without subsampling, nor
    those that reveal in which steps the example took part.

References:
  Zhu, Dong and Wang (2022), arXiv:2106.08567; Chua et al. (2024), arXiv:2411.04205.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from accounting import neighboring_relation, sampler_registry
from accounting.intervals import Bounds, ByDirection, NoiseBounds, least
from accounting.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    REPLACE_SPECIAL,
)
from accounting.numerics.calibration import smallest_noise, smallest_noise_in_two
from accounting.plan import DpSgdPlan
from accounting.pld import (
    dominating_pairs,
    gaussian,
    poisson_lower_bound,
    privacy_profile,
    user_pairs,
)
from accounting.pld.dominating_pairs import Step
from accounting.pld.inversion import LaplaceSum
from accounting.pld.privacy_profile import Profile
from accounting.samplers import audit_case
from accounting.samplers.audit_case import Observe
from accounting.samplers.composed_steps import ComposedSteps

METHOD = "Poisson-subsampled Gaussian, numerical composition (Zhu et al. 2022)"
LOWER_METHOD = "merged outcomes of the Poisson-subsampled Gaussian"
REPLACE_METHOD = "Poisson-subsampled Gaussian with opposite gradients, composed"
REPLACE_LOWER_METHOD = "merged outcomes of the Poisson-subsampled pair of opposites"
USER_METHOD = "mixture of Gaussians for a user's rows (Choquette-Choo et al. 2024)"
USER_LOWER_METHOD = "merged outcomes of the mixture of Gaussians for a user's rows"
EXACT_METHOD = "Gaussian mechanism, closed form (Balle and Wang 2018)"
DISCRETIZATION = (
    "connect-the-dots grid chosen per question, sums by a tilted Fourier transform"
)
_PARTICIPATION = "probability of taking part at all"
#: Below this noise the loss of a step spans so much that closed forms are better.
_LEAST_NOISE = 0.005


def probability(plan: DpSgdPlan) -> float:
    """Returns the sampling probability, rounded up, which is less private."""
    exact = plan.sampling_probability
    rounded = float(exact)
    return rounded if rounded >= exact else min(1.0, math.nextafter(rounded, 1.0))


def steps(sampling_probability: float, noise_multiplier: float) -> tuple[Step, Step]:
    """Returns one step in both directions, as mixtures with a single component.

    Args:
      sampling_probability: q, in (0, 1].
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
    """
    return (
        [(1.0, dominating_pairs.remove_pair(sampling_probability, noise_multiplier))],
        [(1.0, dominating_pairs.add_pair(sampling_probability, noise_multiplier))],
    )


def log_never(plan: DpSgdPlan) -> float:
    """Returns the logarithm of the probability that an example is in no step."""
    rate = probability(plan)
    return plan.num_steps * math.log1p(-rate) if rate < 1.0 else -math.inf


def _participation_deltas(plan: DpSgdPlan, epsilon: float) -> tuple[float, float]:
    """Returns delta of removing and adding if the example's steps are revealed.

    Exact without noise.
    """
    never = log_never(plan)
    return -math.expm1(never), -math.expm1(min(0.0, epsilon + never))


def _participation_epsilon(plan: DpSgdPlan, delta: float) -> float:
    never = log_never(plan)
    if -math.expm1(never) > delta:
        return math.inf
    return max(0.0, math.log1p(-delta) - never)


def composes(plan: DpSgdPlan, noise_multiplier: float) -> bool:
    """Whether losses are composed numerically, instead of closed forms only.

    Args:
      plan: A plan of Poisson batches.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
    """
    return probability(plan) < 1.0 and _LEAST_NOISE <= noise_multiplier < math.inf


def delta(
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
      fineness: Fineness of the grid of losses; see `privacy_profile.Profile`.
    """
    closed = gaussian.gaussian_delta(_effective(plan, noise_multiplier), epsilon)
    if plan.sampling_probability == 1:
        lower = _exact_lower_delta(plan, noise_multiplier, epsilon)
        return Bounds(upper=closed, lower=lower, method=EXACT_METHOD)
    options = [
        (closed, EXACT_METHOD),
        (max(_participation_deltas(plan, epsilon)), _PARTICIPATION),
    ]
    if composes(plan, noise_multiplier):
        profile = _profile(plan, noise_multiplier, fineness)
        options.insert(0, (profile.delta(epsilon), METHOD))
    return least(*options)


def _effective(plan: DpSgdPlan, noise_multiplier: float) -> float:
    """Returns the noise multiplier of all steps together, without subsampling."""
    return noise_multiplier / math.sqrt(plan.num_steps)


def _exact_lower_delta(
    plan: DpSgdPlan, noise_multiplier: float, epsilon: float
) -> float:
    effective = _effective(plan, noise_multiplier)
    return gaussian.gaussian_delta(effective, epsilon, upper=False)


def delta_by_direction(
    plan: DpSgdPlan, noise_multiplier: float, epsilon: float
) -> ByDirection:
    """Returns bounds on delta in each direction; arguments as for `delta`."""
    if plan.sampling_probability == 1:
        exact = delta(plan, noise_multiplier, epsilon)
        return ByDirection(remove=exact, add=exact)
    closed = gaussian.gaussian_delta(_effective(plan, noise_multiplier), epsilon)
    numerical: tuple[float, ...] = (1.0, 1.0)
    if composes(plan, noise_multiplier):
        numerical = _profile(plan, noise_multiplier).delta_by_direction(epsilon)
    remove, add = (
        least((value, METHOD), (closed, EXACT_METHOD), (revealed, _PARTICIPATION))
        for value, revealed in zip(
            numerical, _participation_deltas(plan, epsilon), strict=True
        )
    )
    return ByDirection(remove=remove, add=add)


def epsilon(plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
    """Returns bounds on epsilon at ``delta``; arguments as for `epsilon_function`."""
    value, method = epsilon_function(plan, noise_multiplier, delta)(delta)
    lower = None
    if plan.sampling_probability == 1:
        effective = _effective(plan, noise_multiplier)
        lower = gaussian.gaussian_epsilon(effective, delta, upper=False)
    return Bounds(upper=value, lower=lower, method=method)


def epsilon_function(
    plan: DpSgdPlan, noise_multiplier: float, delta: float
) -> Callable[[float], tuple[float, str]]:
    """Returns a function: delta -> an upper bound on epsilon, and its method.

    The numerical part is computed once, and is tight near ``delta``.

    Args:
      plan: A plan of Poisson batches.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      delta: In (0, 1).
    """
    effective = _effective(plan, noise_multiplier)
    sums: tuple[LaplaceSum, ...] = ()
    if composes(plan, noise_multiplier):
        sums = _profile(plan, noise_multiplier).sums_at(delta)

    def upper(point: float) -> tuple[float, str]:
        options = [(gaussian.gaussian_epsilon(effective, point), EXACT_METHOD)]
        if plan.sampling_probability < 1:
            options.append((_participation_epsilon(plan, point), _PARTICIPATION))
        if sums:
            options.append((privacy_profile.epsilon_of(sums, point), METHOD))
        return min(options, key=lambda option: option[0])

    return upper


def _profile(
    plan: DpSgdPlan, noise_multiplier: float, fineness: float = privacy_profile.FINE
) -> Profile:
    return Profile(
        directions=steps(probability(plan), noise_multiplier),
        num_steps=plan.num_steps,
        fineness=fineness,
    )


def guess(plan: DpSgdPlan, epsilon: float, delta: float) -> float:
    """Returns a cheap approximation of the noise multiplier that is needed.

    Args:
      plan: A plan of Poisson batches; a cap is ignored.
      epsilon: At least 0.
      delta: In (0, 1).
    """
    if plan.sampling_probability == 1:
        return gaussian.gaussian_noise(epsilon, delta) * math.sqrt(plan.num_steps)

    def log_excess(noise: float) -> float:
        if noise < _LEAST_NOISE:
            return 700.0
        step = steps(probability(plan), noise)[0]
        approximate = privacy_profile.approximate_log_delta(
            step, plan.num_steps, epsilon
        )
        return approximate - math.log(delta)

    found = smallest_noise(log_excess, 1.0, tolerance=3e-3)
    return found if math.isfinite(found) else 1.0


def noise_multiplier(plan: DpSgdPlan, epsilon: float, delta: float) -> NoiseBounds:
    """Returns a noise multiplier that suffices for ``(epsilon, delta)``.

    Args:
      plan: A plan of Poisson batches.
      epsilon: At least 0.
      delta: In (0, 1).
    """
    value = smallest_noise_in_two(
        lambda noise, fineness: _delta(plan, noise, epsilon, fineness),
        target=delta,
        guess=guess(plan, epsilon, delta),
        coarse=privacy_profile.COARSE,
        fine=privacy_profile.FINE,
        coarse_tolerance=privacy_profile.COARSE / 5,
    )
    return NoiseBounds(sufficient=value, method=METHOD)


def _delta(
    plan: DpSgdPlan, noise_multiplier: float, epsilon: float, fineness: float
) -> float:
    # ``delta`` is an argument's name above.
    return delta(plan, noise_multiplier, epsilon, fineness).guarantee


def lower_delta(plan: DpSgdPlan, noise_multiplier: float, epsilon: float) -> float:
    """Returns a lower bound on delta; takes about a second.

    Arguments as for `delta`.
    """
    if plan.sampling_probability == 1:
        return _exact_lower_delta(plan, noise_multiplier, epsilon)
    # Rounded down, as less sampling is more private.
    rate = math.nextafter(float(plan.sampling_probability), 0.0)
    return lower_delta_at(rate, plan.num_steps, noise_multiplier, epsilon)


def lower_delta_at(
    rate: float, num_steps: int, noise_multiplier: float, epsilon: float
) -> float:
    """Returns a lower bound on delta of Poisson batches at any rate.

    Args:
      rate: Probability of being in a step, rounded down; below 1.
      num_steps: T.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      epsilon: At least 0.
    """
    if noise_multiplier == 0.0:
        # What is seen is whether the example took part.
        return -math.expm1(num_steps * math.log1p(-rate)) * (1 - 1e-14)
    if not 0.0 < rate < 1.0 or noise_multiplier < _LEAST_NOISE:
        return 0.0
    return poisson_lower_bound.lower_delta(rate, noise_multiplier, num_steps, epsilon)


def replacing_steps(
    sampling_probability: float, noise_multiplier: float
) -> tuple[Step, ...]:
    """Returns one step under replace-one, the same in both directions.

    Args:
      sampling_probability: q, in (0, 1].
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
    """
    pair = dominating_pairs.replace_pair(sampling_probability, noise_multiplier)
    return ([(1.0, pair)],)


def score(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score of an audit; arguments as for `audit_case.Score`."""
    del positions, means  # every row is alike, and others contribute nothing
    rate = float(plan.sampling_probability)
    pair = dominating_pairs.remove_pair(rate, noise_multiplier)
    total = pair.loss(observe(0))
    for step in range(1, plan.num_steps):
        total += pair.loss(observe(step))
    return total


def user_score(
    count: int,
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score of an audit of users with ``count`` examples.

    Args:
      count: Of the canary's examples.
      plan: As for `audit_case.Score`, and so are the rest.
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
      observe: What was released.
      positions: Not used: every row is alike.
      means: Not used: others contribute nothing.
    """
    del positions, means
    rate = float(plan.sampling_probability)
    ((_, pair),), _ = user_pairs.steps(count, rate, noise_multiplier)
    total = pair.loss(observe(0))
    for step in range(1, plan.num_steps):
        total += pair.loss(observe(step))
    return total


def user_audit(count: int) -> audit_case.Audit:
    """Returns the audit of users with ``count`` examples, whatever other rows do."""
    return audit_case.Audit(
        worst_case=functools.partial(audit_case.own_block, canary_rows=count),
        score=functools.partial(user_score, count),
    )


def event(dp_accounting: Any, plan: DpSgdPlan, noise_multiplier: float) -> Any:
    """Returns the ``DpEvent`` of a run, with q rounded up.

    Args:
      dp_accounting: The package.
      plan: A plan of Poisson batches.
      noise_multiplier: Noise standard deviation over the clip norm.
    """
    step = dp_accounting.PoissonSampledDpEvent(
        probability(plan), dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    return dp_accounting.SelfComposedDpEvent(step, plan.num_steps)


def user_event(
    count: int, dp_accounting: Any, plan: DpSgdPlan, noise_multiplier: float
) -> Any:
    """Returns the ``DpEvent`` of a user's examples; None before dp_accounting 0.6.

    Args:
      count: Of the user's examples.
      dp_accounting: The package.
      plan: A plan of Poisson batches.
      noise_multiplier: Noise standard deviation over the clip norm.
    """
    step = getattr(dp_accounting.dp_event, "MixtureOfGaussiansDpEvent", None)
    if step is None:
        return None
    weights = user_pairs.weights(count, probability(plan))
    one = step(noise_multiplier, tuple(map(float, range(count + 1))), weights)
    return dp_accounting.SelfComposedDpEvent(one, plan.num_steps)


def composed_for_users(count: int) -> ComposedSteps:
    """Returns the bounds for all examples of a user, of which there are ``count``."""
    return ComposedSteps(
        steps=functools.partial(user_pairs.steps, count),
        components=functools.partial(user_pairs.components, count),
        sensitivity=count,
        num_rows=count,
        method=USER_METHOD,
    )


def of_users(count: int) -> sampler_registry.Sampler:
    """Returns what is brought for users with at most ``count`` examples."""
    event = sampler_registry.Event(
        build=functools.partial(user_event, count), relation=ADD_OR_REMOVE_ONE
    )
    found = _bounded_by(composed_for_users(count), USER_LOWER_METHOD, event)
    return dataclasses.replace(found, audit=user_audit(count))


def _bounded_by(
    found: ComposedSteps, lower_method: str, event: sampler_registry.Event
) -> sampler_registry.Sampler:
    return dataclasses.replace(
        _ZERO_OUT,
        epsilon=found.epsilon,
        delta=found.delta,
        noise_multiplier=found.noise_multiplier,
        delta_by_direction=found.delta_by_direction,
        lower_bound=sampler_registry.LowerBound(
            delta=found.lower_delta, method=lower_method
        ),
        event=event,
        audit=None,
    )


WORDING = sampler_registry.Wording(
    sampling="Poisson subsampling, each example in each step independently",
    discretization=DISCRETIZATION,
)
_REPLACING = ComposedSteps(
    steps=replacing_steps,
    components=poisson_lower_bound.replaced,
    sensitivity=2,
    num_rows=1,
    method=REPLACE_METHOD,
)
_ZERO_OUT = sampler_registry.Sampler(
    epsilon=epsilon,
    delta=delta,
    noise_multiplier=noise_multiplier,
    closed_form=False,
    relations=(REPLACE_SPECIAL, ADD_OR_REMOVE_ONE, REPLACE_ONE),
    delta_by_direction=delta_by_direction,
    lower_bound=sampler_registry.LowerBound(delta=lower_delta, method=LOWER_METHOD),
    poisson_rate=probability,
    event=sampler_registry.Event(build=event, relation=ADD_OR_REMOVE_ONE),
    wording=WORDING,
    audit=audit_case.Audit(worst_case=audit_case.own_block, score=score),
)
SAMPLER = dataclasses.replace(
    _ZERO_OUT,
    users=of_users,
    under={
        # The same pairs, as long as q is the same for both data sets.
        ADD_OR_REMOVE_ONE: dataclasses.replace(
            _ZERO_OUT,
            wording=dataclasses.replace(
                WORDING,
                num_examples="num_examples is an approximation that is public and "
                "independent of the data: it fixes the sampling probability alone",
            ),
        ),
        REPLACE_ONE: dataclasses.replace(
            _bounded_by(
                _REPLACING,
                REPLACE_LOWER_METHOD,
                sampler_registry.Event(build=event, relation=REPLACE_ONE),
            ),
            wording=dataclasses.replace(
                WORDING, num_examples=neighboring_relation.SAME_NUMBER
            ),
        ),
    },
)
