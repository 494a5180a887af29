"""Truncated Poisson subsampling: a random subset of at most B examples per step.

Several upper bounds hold; the smallest one is used, and the answer names it:

  - Additive: that of Poisson batches, and the cost of the cap; see *The cap*.
  - Mixture: one step is dominated by a public mixture, over the number of other rows
    that are sampled; the example displaces another one if at least B are.
  - Revealed (zero-out): which rows a truncated step keeps is revealed.
  - Closed form: all draws are revealed.  Under zero-out, both data sets keep the same
    rows, and a step's sum has the sensitivity of the rows in which they differ, at most
    B; under add-or-remove twice that, since as many others may be displaced.
  - Participation: ``delta(eps) <= 1 - (1-q)^T``, the probability that the example is
    ever sampled.  If it is not, its presence changes nothing.

Mixture and revealed rows are below, for examples and users.  Under add-or-remove, all
hold for data sets of at most n examples, with q fixed.

*One step.*  A step samples m rows of others and i of the user's, each with probability
q, and puts all of them in a uniformly random order, of which it keeps the first B.
None of this depends on what rows contain.  The user has at most k rows, hence i is
stochastically at most Bin(k, q).  By the theorem of `dominating_pairs`, a step may be
bounded with more rows, or with larger changes of the sum.  An example is a user with k
= 1.

Displaced rows (under both relations).  Reveal the sampled rows of others in order.
Without the user, the step keeps the first ``min(m, B)`` of them.  If j <= min(i, B)
rows of the user are kept, it keeps the first ``min(m, B - j)``: the user displaces
``d = max(0, j - (B - m)+)`` others, and changes the sum by at most ``j + d`` clip
norms.  Under zero-out, ghosts displace as many others, and change the sum by at most d.
Under add-or-remove there is no change without the user.  Both numbers rise with j and
with m.  The step is dominated by the public mixture, over m, of the pair with Bin(k, q)
rows.  There are at most n - 1 others: m is stochastically at most Bin(n - 1, q).  So it
holds for at most n examples and for users with fewer rows; m is rounded up to a few
values.

Under zero-out there are n slots, ghosts among them, and the step with ``m >= B`` loses
less: a full step may drop the user's rows.  Reveal the first B others, not m.  For any
m this list is uniform over the ordered lists of B others, so that it says nothing of m.
Put the user's i rows one by one at random places into the order of the others: the l-th
comes among the first B with probability ``B / (m + l)``, independently, and those that
did not are not kept.  Hence j is stochastically at most Bin(k, q B / (m + 1)), for m
drawn given ``m >= B``.  This mixture K of binomials falls as m rises, and m is least if
the user has all k rows: take m from Bin(n - k, q).  A user with fewer rows sees
``m >= B`` more often: what this probability is above that of Bin(n - k, q) keeps the
pair with Bin(k, q) rows, which dominates that of K and those of all smaller m.  With
one row, K has the probability ``Pr[Bin(n, q) > B] B / (n Pr[Bin(n - 1, q) >= B])`` of
Ganesh (2025), section 3; the change without the example is at most 1 there, not 2.

Revealed rows (under zero-out alone).  With ghosts in the user's slots, n rows are
drawn, and the same ones are kept: which ones may be revealed.  If ``i + m <= B``,
nothing is truncated.  Reveal which others are sampled: the number of the user's rows is
Bin(k, q) under the condition that it is at most B - m, hence stochastically at most
Bin(k, q), and the step has the pair without a cap.  If ``i + m > B``, reveal the kept
rows: a Gaussian mechanism of sensitivity ``min(i, B)``, where i has the probability
``w_i Pr[Bin(n - k, q) > B - i]``.  A user with fewer rows loses less: count other slots
as the user's until there are k.  This leaves ``i + m`` as it is, and i can only grow.

The first bound is better for much noise, which hides whether a row is kept, the second
for little noise or many rows.  Neither costs anything that counts where a step is
truncated with a probability far below delta.

*The cap*, and its cost for any mechanism (`truncation_delta`):

    delta(eps) <= delta_Poisson(eps) + (1 + e^eps) T Pr[Bin(n, q) > B].

Couple the truncated sampler with the untruncated one.  They differ with probability at
most ``eta = T Pr[Bin(n, q) > B]`` on either data set, so
``Pr[M(D) in S] <= Pr[M_P(D) in S] + eta <= e^eps Pr[M_P(D') in S] + delta_P + eta
<= e^eps (Pr[M(D') in S] + eta) + delta_P + eta``.  It holds for the rows of a user,
too: with or without them, truncation changes a step only if more than B are sampled.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorem 3.3; Ganesh (2025), arXiv:2508.15089,
  and section 5.3 of Google's "Privacy Loss Distributions", for the mixture of an
  example; there a ghost that displaces another changes the sum by 2 clip norms.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from scipy import optimize, special, stats

from accounting.core import sampler_registry
from accounting.core.intervals import Bounds, NoiseBounds, least
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE, REPLACE_SPECIAL
from accounting.core.numerics import epsilon_after_cost, smallest_noise_in_two
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import dominating_pairs, privacy_profile
from accounting.core.pld.dominating_pairs import Pair, Step, remove_pair
from accounting.core.samplers import poisson
from accounting.core.samplers.poisson import (
    PARTICIPATION,
    ComposedSteps,
    probability,
    rounded_up,
)

#: Beyond this many deviations, numbers of other rows are not told apart; up to there,
#: this many numbers are.
_DEVIATIONS, _NUMBERS = 9, 1024


def displaced_steps(
    num_rows: int,
    ghosts: bool,
    num_examples: int,
    sampling_probability: float,
    truncated_batch_size: int,
    noise_multiplier: float,
) -> tuple[Step, Step]:
    """Returns one step with displaced rows in both directions, remove first.

    Args:
      num_rows: k, at least 1.
      ghosts: Whether ghosts are in the slots of an absent user, as under zero-out.
      num_examples: n, with ghosts the number of slots, else an upper bound on the
        number of examples.
      sampling_probability: q, in (0, 1).
      truncated_batch_size: B.
      noise_multiplier: s, above 0.
    """
    rate, size, others = sampling_probability, truncated_batch_size, num_examples - 1
    likely = dominating_pairs.upper_weights(num_rows, rate)
    cases = [
        (mass, room, likely) for room, mass in _rooms(others, rate, size, num_rows)
    ]
    if ghosts:
        others = max(num_examples - num_rows, 0)
        full = tail_probability(others, rate, size - 1) / TAIL_SLACK**2
        if full > 0.0:
            rest = cases[0][0] - full
            kept = _kept_weights(num_rows, others, rate, size)
            cases[:1] = [(full, 0, kept), (rest, 0, likely)]
    counts = [min(count, size) for count in range(num_rows + 1)]
    remove: Step = []
    add: Step = []
    for mass, room, weights in cases:
        displaced = tuple(max(0, count - room) for count in counts)
        present = tuple(map(sum, zip(counts, displaced, strict=True)))
        absent = displaced if ghosts else (0,) * (num_rows + 1)
        make = functools.partial(
            Pair, weights=weights, noise_multiplier=noise_multiplier
        )
        remove.append((mass, make(upper=present, lower=absent)))
        add.append((mass, make(upper=absent, lower=present)))
    return remove, add


def _kept_weights(
    num_rows: int, num_others: int, rate: float, size: int
) -> tuple[float, ...]:
    """Returns K: how many of the user's rows are kept beside B others or more.

    The number m of others is rounded down to a few values, and so is the probability
    that it is larger.
    """
    deviation = math.sqrt(num_others * rate * (1 - rate))
    reach = min(num_others - size, int(_DEVIATIONS * deviation) + _DEVIATIONS**2)
    numbers = size + np.unique(np.rint(np.linspace(0, reach, _NUMBERS)).astype(int))
    tails = [tail_probability(num_others, rate, int(m) - 1) for m in numbers]
    more = np.array([*tails, 0.0]) / (tails[0] * TAIL_SLACK**2)
    more[0] = 1.0
    chances = np.minimum(rate, rate * size / (numbers + 1.0) * TAIL_SLACK)
    kept = stats.binom.pmf(np.arange(num_rows + 1), num_rows, chances[:, None])
    return dominating_pairs.probable(-np.diff(more) @ kept)


def _rooms(
    num_others: int, rate: float, size: int, num_rows: int
) -> list[tuple[int, float]]:
    """Returns how many of the user's rows fit beside the others, rounded down.

    The numbers are 0, powers of two, and k, for which nothing is displaced.  Each comes
    with its probability.
    """
    powers = (1 << power for power in range(num_rows.bit_length()))
    rooms = [0, *(room for room in powers if room < num_rows), num_rows]
    # Probability of less room than each: that of less than 0 is counted at 0.
    less = [
        0.0,
        *(tail_probability(num_others, rate, size - r) for r in rooms[1:]),
        1.0,
    ]
    # Tails are rounded up: the largest room has what is left.
    masses = (after - before for before, after in itertools.pairwise(less))
    return [
        (room, mass) for room, mass in zip(rooms, masses, strict=True) if mass > 0.0
    ]


def revealed_steps(
    num_rows: int,
    num_examples: int,
    sampling_probability: float,
    truncated_batch_size: int,
    noise_multiplier: float,
) -> tuple[Step, Step]:
    """Returns one step with revealed rows in both directions, remove first.

    Args:
      num_rows: k, at least 1.
      num_examples: n, number of slots.
      sampling_probability: q, in (0, 1).
      truncated_batch_size: B.
      noise_multiplier: s, above 0.
    """
    rate, size = sampling_probability, truncated_batch_size
    alone = dominating_pairs.steps(num_rows, rate, noise_multiplier)
    truncated = tail_probability(num_examples, rate, size)
    whole = 1 - truncated / TAIL_SLACK**2
    others = max(num_examples - num_rows, 0)
    shown: Step = []
    for count, weight in enumerate(dominating_pairs.upper_weights(num_rows, rate)):
        mass = weight * tail_probability(others, rate, size - count)
        if count and mass > 0.0:
            noise = noise_multiplier / min(count, size)
            shown.append((mass, remove_pair(1.0, noise)))
    # All masses but that of a step without the user are rounded up.
    nothing = 1 - whole - sum(mass for mass, _ in shown)
    if nothing > 0.0:
        shown.append((nothing, remove_pair(0.0, noise_multiplier)))
    remove, add = ([(whole, one[0][1]), *shown] for one in alone)
    return remove, add


#: Largest share of a target delta for truncation by `smallest_cap`.
_SHARE_OF_DELTA = 1e-5
#: Factor that covers the relative error of the incomplete beta function.
TAIL_SLACK = 1 + 1e-9


def tail_probability(
    num_trials: int, sampling_probability: float, threshold: int
) -> float:
    """Returns ``Pr[Bin(num_trials, sampling_probability) > threshold]``, rounded up.

    Args:
      num_trials: At least 0.
      sampling_probability: In (0, 1].
      threshold: Any integer.
    """
    if threshold >= num_trials:
        return 0.0
    if threshold < 0:
        return 1.0
    tail = special.betainc(threshold + 1, num_trials - threshold, sampling_probability)
    return min(1.0, float(tail) * TAIL_SLACK)


def step_tail(plan: DpSgdPlan, size: int) -> float:
    """Returns a bound on the probability that a step has more than ``size`` examples.

    If examples are in groups, the step is one of the group of a given example, and that
    example counts as sampled.  Each other example is in that group and that step with
    probability b/n.

    Args:
      plan: A plan of Poisson batches.
      size: At least 1.
    """
    rate = rounded_up(Fraction(plan.expected_batch_size, plan.num_examples))
    if plan.bands is None:
        return tail_probability(plan.num_examples, rate, size)
    return tail_probability(plan.num_examples - 1, rate, size - 1)


def truncation_probability(plan: DpSgdPlan) -> float:
    """Returns the probability that one given step is truncated; see `step_tail`."""
    assert plan.truncated_batch_size is not None
    return step_tail(plan, plan.truncated_batch_size)


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
    allowed = math.log(_SHARE_OF_DELTA) + math.log(delta) - math.log(plan.num_steps)
    allowed -= epsilon + math.log1p(math.exp(-epsilon))

    def is_enough(size: int) -> bool:
        tail = step_tail(plan, size)
        return tail == 0.0 or math.log(tail) <= allowed

    sizes = range(plan.expected_batch_size, plan.num_examples)
    return sizes.start + bisect.bisect_left(sizes, True, key=is_enough)


TRUNCATION = sampler_registry.Truncation(
    untruncated="poisson", delta=truncation_delta, smallest_cap=smallest_cap
)


ADDITIVE = "Poisson plus truncation (Chua et al. 2024, Theorem 3.3)"
USER_ADDITIVE = poisson.USER_METHOD + ", plus truncation"
MIXTURE = "truncated mixture (after Ganesh 2025; see truncated_poisson)"
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
            (dominating_pairs.gaussian_delta(effective, epsilon), CLOSED),
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

    def profile(
        self, plan: DpSgdPlan, noise_multiplier: float
    ) -> Callable[[float], tuple[float, float]]:
        """Returns a function: epsilon -> upper bounds on delta in each direction.

        Args:
          plan: A plan of truncated Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
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
        """Returns bounds on epsilon at ``delta``.

        Args:
          plan: A plan of truncated Poisson batches.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          delta: In (0, 1).
        """
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
            (dominating_pairs.gaussian_epsilon(effective, delta), CLOSED),
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
    displaced = functools.partial(displaced_steps, count, ghosts)
    mixtures: dict[str, _Mixing] = {MIXTURE if one else USER_MIXTURE: displaced}
    if ghosts:
        revealed = functools.partial(revealed_steps, count)
        mixtures[REVEALED if one else USER_REVEALED] = revealed
    return TruncatedBounds(
        untruncated=poisson.OF_EXAMPLE if one else poisson.of_user(count),
        additive=ADDITIVE if one else USER_ADDITIVE,
        mixtures=mixtures,
        ghosts=ghosts,
    )


def _of_users(
    base: sampler_registry.Sampler, ghosts: bool, count: int
) -> sampler_registry.Sampler:
    """Returns the `Sampler` for users with at most ``count`` examples."""
    found = sampler_registry.bounds_of(bounds_of(count, ghosts=ghosts))
    return dataclasses.replace(base, **found)


OF_EXAMPLE = bounds_of(1, ghosts=True)
OF_ADDED = bounds_of(1, ghosts=False)
_WORDING = sampler_registry.Wording(
    sampling="Poisson subsampling, each example in each step independently; a step "
    "with more than truncated_batch_size examples keeps a uniformly random subset",
    discretization=poisson.DISCRETIZATION,
)
_ZERO_OUT = sampler_registry.Sampler(
    **sampler_registry.bounds_of(OF_EXAMPLE),
    closed_form=False,
    relations=(REPLACE_SPECIAL, ADD_OR_REMOVE_ONE),
    poisson_rate=probability,
    truncation=TRUNCATION,
    wording=_WORDING,
)
_ADD_OR_REMOVE = dataclasses.replace(
    _ZERO_OUT,
    **sampler_registry.bounds_of(OF_ADDED),
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
