"""What is known of a mechanism: bounds on its divergences, and these on a grid.

A *profile* gives upper bounds ``delta(s)`` and ``rho(s)``, at every s >= 0, on the
hockey-stick divergences ``H_(e^s)(P || Q)`` and ``H_(e^s)(Q || P)``, where P and Q are
the outputs on two neighbouring data sets.  No more is known of a selection or of a
shuffle.

Formal guarantees:
  - ``bounds_on_grid`` gives upper bounds at every grid point, also where it asks for
    few: H is convex in ``e^s``, so that it is below the line between two points.

Group privacy is by `group_epsilon`.  A run's profile is that of `accountant.delta`,
under the same relation and unit.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from accounting.core import accountant
from accounting.core.neighboring_relation import REPLACE_SPECIAL, brought
from accounting.core.numerics import log_ratio, settled_epsilon, threshold
from accounting.core.plan import DpSgdPlan
from accounting.core.pld.gaussian import gaussian_delta
from accounting.core.validation import check_int

Array = NDArray[np.float64]

#: Of a costly profile, bounds are asked for at every so many grid points.
_STRIDE = 8
#: Bounds are no longer asked for where so many in a row did not fall.
_MOST_FLAT = 8
_MOST_POINTS = 1 << 17
_LEAST_EPSILON, _MOST_EPSILON = 1e-6, 1e4
#: Where searches for epsilon may start.
_STARTS = tuple(1.1**power for power in range(70))


@dataclasses.dataclass(frozen=True)
class Profile:
    """Upper bounds on the divergences between a mechanism's outputs on neighbours.

    Attributes:
      deltas: Epsilon at least 0 -> bounds on delta in both directions.
      is_costly: Whether an answer takes milliseconds, so that few are asked for.
    """

    deltas: Callable[[float], tuple[float, float]]
    is_costly: bool = False

    def epsilon(self, delta: float, relative: float = 1e-6) -> float:
        """Returns an epsilon at which ``delta`` is proven; infinite if none is.

        Args:
          delta: In (0, 1).
          relative: Relative error of the search.
        """

        @functools.cache
        def excess(epsilon: float) -> float:
            return log_ratio(max(self.deltas(epsilon)), delta)

        # The cost of a cap rises with epsilon: a search by leaps might miss its place.
        start = next((point for point in _STARTS if excess(point) <= 0.0), 1.0)
        return threshold(
            excess, start, relative=relative, least=_LEAST_EPSILON, most=_MOST_EPSILON
        )[1]


def bounds_on_grid(
    profile: Profile, spacing: float, least: float
) -> tuple[Array, Array]:
    """Returns both bounds at 0, h, 2 h and so on; they fall, and start at one value.

    Args:
      profile: The mechanism.
      spacing: h, above 0.
      least: A delta that is negligible: no further point is asked for.

    Returns:
      Two arrays of shape (n,).
    """
    stride = _STRIDE if profile.is_costly else 1
    found: list[tuple[float, float]] = []
    flat = 0
    for place in range(0, _MOST_POINTS, stride):
        point = profile.deltas(place * spacing)
        if found:
            # What holds at a smaller epsilon holds at a larger one.
            point = min(point[0], found[-1][0]), min(point[1], found[-1][1])
            # A bound of 1 is not flat: it says nothing yet.
            flat = flat + 1 if point == found[-1] and max(point) < 1.0 else 0
        found.append(point)
        if max(point) <= least or flat >= _MOST_FLAT:
            break
    both = np.minimum(np.array(found), 1.0)
    both[0] = both[0].min()  # the total variation, in either direction
    # Divergences are convex in e^s: between two points they are below the line.
    asked = np.exp(spacing * stride * np.arange(len(both)))
    ratios = np.exp(spacing * np.arange(stride * (len(both) - 1) + 1))
    forward, backward = (np.interp(ratios, asked, one) for one in both.T)
    return forward, backward


def gaussian(noise_multiplier: float) -> Profile:
    """Returns the profile of one Gaussian release.

    Args:
      noise_multiplier: Noise standard deviation over the L2 sensitivity.
    """
    accountant.check_noise_multiplier(noise_multiplier)

    def deltas(epsilon: float) -> tuple[float, float]:
        found = gaussian_delta(noise_multiplier, epsilon)
        return found, found

    return Profile(deltas)


def run(
    plan: DpSgdPlan,
    noise_multiplier: float,
    *,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Profile:
    """Returns the profile of a training run; arguments as for `accountant.delta`.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the profile is for all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    noise = accountant.check_noise_multiplier(noise_multiplier)
    sampler = brought(plan.sampler, neighboring_relation, max_examples_per_user)
    if sampler.profile is not None:
        # Laws of a selection ask for the same epsilons.
        return Profile(functools.cache(sampler.profile(plan, noise)))

    def deltas(epsilon: float) -> tuple[float, float]:
        found = sampler.delta(plan, noise, epsilon).guarantee
        return found, found

    return Profile(deltas, is_costly=not sampler.closed_form)


def group_epsilon(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    group_size: int,
    max_examples_per_user: int = 1,
) -> float:
    """Returns an epsilon for data sets that differ by several zero-outs.

    Of an example and its replacement, which are a group of two, or of many examples of
    a user.  By group privacy: if the plan is (e, d)-private for one, it is ``(k e, d
    (e^(k e) - 1) / (e^e - 1))``-private for k.  Infinite if no e is proven.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: Delta of the claim for the group, in (0, 1).
      group_size: k, at least 1.
      max_examples_per_user: Examples of each member of the group; above 1 it is that of
        `accountant.epsilon` for users.

    Raises:
      InputError: a value out of range.
    """
    check_int("group_size", group_size, at_least=1)
    accountant.check_delta(delta)

    def needed(epsilon: float) -> float:
        log_share = -math.log(group_size)
        if epsilon > 0.0:
            log_share = _log_expm1(epsilon) - _log_expm1(group_size * epsilon)
        if math.log(delta) + log_share < -680.0:
            return math.inf
        return accountant.epsilon(
            plan,
            noise_multiplier=noise_multiplier,
            delta=delta * math.exp(log_share) if group_size > 1 else delta,
            max_examples_per_user=max_examples_per_user,
        ).guarantee

    if group_size == 1:
        return needed(0.0)
    return group_size * settled_epsilon(needed, margin=1e-5, most_tries=60)


def _log_expm1(value: float) -> float:
    """Returns ``ln(e^value - 1)``."""
    return value + math.log(-math.expm1(-value))
