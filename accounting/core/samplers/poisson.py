"""Poisson subsampling: each example is in each step independently with probability q.

Under the zero-out relation (an example is replaced by a ghost that contributes zero),
T steps are tightly dominated, in each direction, by the T-fold composition of the pair
``((1-q) N(0, s^2) + q N(1, s^2), N(0, s^2))`` or its reverse.

Under replace-one the tightly dominating pair of a step is
``P = (1-q) N(0, s^2) + q N(1, s^2)`` against ``Q = (1-q) N(0, s^2) + q N(-1, s^2)``,
which equals its reverse.  Proof: let a gradient u of norm a <= 1 be replaced by v of
norm b <= 1.  For k >= 1 and ``c = (1-q)(k-1)``, the hockey-stick divergence is
``E[(q X - k q Y - c)+]``, in densities relative to N(0, s^2 I).  X and Y are
exponential martingales of a Gaussian with variances a^2/s^2 and b^2/s^2 and covariance
<u, v>/s^2: the divergence is the price of a spread option.  Its payoff g is convex with
g_XY <= 0.  Changes dA and dB of the variances and dC of the covariance change the price
by ``E[X^2 g_XX dA + Y^2 g_YY dB] / 2 + E[X Y g_XY dC]``.  So it increases as <u, v>
decreases to -ab, and then as a and b increase to 1.  For k < 1 exchange P and Q.

Formal guarantees, of `ComposedSteps`, which has any dominating pair:
  - ``delta(...).upper`` and ``epsilon(...).upper`` bound both directions from above:
    discretisation, truncation and rounding are added on the private side.
  - They never exceed the bounds of the Gaussian mechanism without subsampling, nor
    those that reveal in which steps the differing rows took part.

References:
  Zhu, Dong and Wang (2022), arXiv:2106.08567; Chua et al. (2024), arXiv:2411.04205.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction

from accounting.core import neighboring_relation, sampler_registry
from accounting.core.intervals import Bounds, NoiseBounds, least
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    REPLACE_SPECIAL,
)
from accounting.core.numerics import smallest_noise_in_two
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import dominating_pairs, privacy_profile
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
        closed = dominating_pairs.gaussian_delta(effective, epsilon)
        if plan.sampling_probability == 1:
            lower = dominating_pairs.gaussian_delta(effective, epsilon, upper=False)
            return Bounds(upper=closed, lower=lower, method=EXACT_METHOD)
        options = [(closed, EXACT_METHOD), (self.participation(plan), PARTICIPATION)]
        if self.composes(plan, noise_multiplier):
            profile = self._profile(plan, noise_multiplier, fineness)
            options.insert(0, (profile.delta(epsilon), self.method))
        return least(*options)

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
            closed = dominating_pairs.gaussian_delta(effective, epsilon)
            remove = self.participation(plan)
            add = remove if self.symmetric else self._added(plan, epsilon)
            numerical = (1.0,) if found is None else found.shared_deltas(epsilon)
            return min(closed, remove, numerical[0]), min(closed, add, numerical[-1])

        return deltas

    def epsilon(self, plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
        """Returns bounds on epsilon at ``delta``.

        Args:
          plan: A plan of Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          delta: In (0, 1).
        """
        found = self.epsilon_function(plan, noise_multiplier, delta)(delta)
        if plan.sampling_probability < 1:
            return found
        effective = self._effective(plan, noise_multiplier)
        lower = dominating_pairs.gaussian_epsilon(effective, delta, upper=False)
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
            options = [
                (dominating_pairs.gaussian_epsilon(effective, point), EXACT_METHOD)
            ]
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


METHOD = "Poisson-subsampled Gaussian, numerical composition (Zhu et al. 2022)"
REPLACE_METHOD = "Poisson-subsampled Gaussian with opposite gradients, composed"
USER_METHOD = "mixture of Gaussians for a user's rows (Choquette-Choo et al. 2024)"
DISCRETIZATION = (
    "connect-the-dots grid chosen per question, sums by a tilted Fourier transform"
)


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


def replacing_steps(
    sampling_probability: float, noise_multiplier: float
) -> tuple[Step, ...]:
    """Returns one step under replace-one, where both directions have the same pair.

    Args:
      sampling_probability: q, in (0, 1].
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
    """
    pair = dominating_pairs.replace_pair(sampling_probability, noise_multiplier)
    return ([(1.0, pair)],)


def of_user(count: int) -> ComposedSteps:
    """Returns the bounds for a user with ``count`` examples."""
    return ComposedSteps(
        steps=functools.partial(dominating_pairs.steps, count),
        sensitivity=count,
        num_rows=count,
        method=USER_METHOD,
        # At 0.05, one row in one step costs an epsilon of 200.
        least_noise=min(0.01 * count, 0.05),
    )


#: The bounds for one example, under zero-out and under add-or-remove.
OF_EXAMPLE = ComposedSteps(
    steps=steps,
    sensitivity=1,
    num_rows=1,
    method=METHOD,
    least_noise=0.005,
)
#: The bounds for an example that is replaced by its opposite.
OF_REPLACED = ComposedSteps(
    steps=replacing_steps,
    sensitivity=2,
    num_rows=1,
    method=REPLACE_METHOD,
    least_noise=0.02,
    symmetric=True,
)
WORDING = sampler_registry.Wording(
    sampling="Poisson subsampling, each example in each step independently",
    discretization=DISCRETIZATION,
)


def _sampler(found: ComposedSteps) -> sampler_registry.Sampler:
    return sampler_registry.Sampler(
        **sampler_registry.bounds_of(found),
        closed_form=False,
        relations=(REPLACE_SPECIAL, ADD_OR_REMOVE_ONE, REPLACE_ONE),
        poisson_rate=probability,
        wording=WORDING,
    )


def of_users(count: int) -> sampler_registry.Sampler:
    """Returns the `Sampler` for users with at most ``count`` examples."""
    return _sampler(of_user(count))


_ADDED_WORDING = dataclasses.replace(
    WORDING,
    num_examples="num_examples is an approximation that is public and "
    "independent of the data: it fixes the sampling probability alone",
)


def _of_added_users(count: int) -> sampler_registry.Sampler:
    return dataclasses.replace(of_users(count), wording=_ADDED_WORDING)


_ZERO_OUT = _sampler(OF_EXAMPLE)
SAMPLER = dataclasses.replace(
    _ZERO_OUT,
    users=of_users,
    under={
        # The same pairs, as long as q is the same for both data sets.
        ADD_OR_REMOVE_ONE: dataclasses.replace(
            _ZERO_OUT, users=_of_added_users, wording=_ADDED_WORDING
        ),
        REPLACE_ONE: dataclasses.replace(
            _sampler(OF_REPLACED),
            wording=dataclasses.replace(
                WORDING, num_examples=neighboring_relation.SAME_NUMBER
            ),
        ),
    },
)
