"""One step of truncated Poisson batches for an example or a user, in two ways.

A step samples m rows of others and i of the user's, each with probability q, and puts
all of them in a uniformly random order, of which it keeps the first B.  None of this
depends on what rows contain.  The user has at most k rows, hence i is stochastically
at most Bin(k, q).  By the theorem of `user_pairs`, a step may be bounded with more
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
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from scipy import stats

from accounting.core.pld import user_pairs
from accounting.core.pld.dominating_pairs import Pair, Step, remove_pair
from accounting.core.samplers.truncation import TAIL_SLACK, tail_probability

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
    likely = user_pairs.upper_weights(num_rows, rate)
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
    return user_pairs.probable(-np.diff(more) @ kept)


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
    alone = user_pairs.steps(num_rows, rate, noise_multiplier)
    truncated = tail_probability(num_examples, rate, size)
    whole = 1 - truncated / TAIL_SLACK**2
    others = max(num_examples - num_rows, 0)
    shown: Step = []
    for count, weight in enumerate(user_pairs.upper_weights(num_rows, rate)):
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
