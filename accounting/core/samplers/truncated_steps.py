"""One step of truncated Poisson batches for an example or a user, in two ways.

A step samples m rows of others and i of the user's, each with probability q, and puts
all of them in a uniformly random order, of which it keeps the first B.  None of this
depends on what rows contain.  The user has at most k rows, hence i is stochastically at
most Bin(k, q).  By the theorem of `dominating_pairs`, a step may be bounded with more
rows, or with larger changes of the sum.  An example is a user with k = 1.

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
``w_i Pr[Bin(n - k, q) > B - i]``.  Fewer rows lose less: count as the user's as many
other slots as are missing to k.  This leaves ``i + m`` as it is, and i can only grow.

The first bound is better for much noise, which hides whether a row is kept, the second
for little noise or many rows.  Neither costs anything that counts where a step is
truncated with a probability far below delta.

The cap, and its cost for any mechanism (`truncation_delta`):

    delta(eps) <= delta_Poisson(eps) + (1 + e^eps) T Pr[Bin(n, q) > B].

Couple the truncated sampler with the untruncated one.  They differ with probability at
most ``eta = T Pr[Bin(n, q) > B]`` on either data set, so
``Pr[M(D) in S] <= Pr[M_P(D) in S] + eta <= e^eps Pr[M_P(D') in S] + delta_P + eta
<= e^eps (Pr[M(D') in S] + eta) + delta_P + eta``.  It holds for the rows of a user,
too: with or without them, truncation changes a step only if more than B are sampled.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorem 3.3.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from fractions import Fraction

import numpy as np
from scipy import special, stats

from accounting.core import sampler_registry
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import dominating_pairs
from accounting.core.pld.dominating_pairs import Pair, Step, remove_pair
from accounting.core.samplers.poisson import rounded_up

#: Largest number of other rows that is told from a larger one, in deviations, and how
#: many numbers up to it are told apart.
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

    Each with its probability: 0, powers of two, and k, for which nothing is displaced.
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

    Where examples are in groups, it is a step of the group of a given example, which
    counts as in it: each other example is in that group and step with probability b/n.

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
