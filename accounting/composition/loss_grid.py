"""A discrete privacy loss on a grid that dominates a mechanism, from its profile.

A *profile* gives upper bounds ``delta(s)`` and ``rho(s)``, at every s >= 0, on the
hockey-stick divergences ``H_(e^s)(P || Q)`` and ``H_(e^s)(Q || P)``, where P and Q are
the outputs on two neighbouring data sets.  No more is known of a selection or of a
shuffle.

Formal guarantees:
  - the discrete loss has at every epsilon, above and below 0, at least the divergence
    that the profile bounds.  So it dominates: it may take the mechanism's place in any
    composition (Zhu, Dong and Wang 2022, Theorem 10), also where a later mechanism is
    chosen from earlier outputs, as long as its profile is fixed.
  - a sum is never more private than the two losses: convolutions of masses >= 0 have a
    relative rounding error only, and what is cut off is moved to larger losses.

*Why it dominates.*  H is convex in ``k = e^s``.  So it is below the greatest convex
function through the bounds at the grid points, which has its corners on the grid.  Any
convex function that falls from 1 at k = 0 with slope -1 at most is the divergence of a
discrete pair: a corner at k where the slope rises by c is a loss ``ln k`` of mass c
under Q, and k c under P.  Below s = 0 the same is said of Q against P, whose corners
are masses under P.  Bounds are raised a little before; that the masses then exceed the
given ones at every grid point is checked.

Public: everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from accounting.core.numerics.root_finding import log_ratio, threshold

Array = NDArray[np.float64]

#: More than the relative rounding error of a sum of masses.
_ROUNDING = 1e-12
#: Factor of the bounds, so that rounding leaves more than the bounds.
_MORE = 1 + 1e-9
#: Of a costly profile, bounds are asked for at every so many grid points.
_STRIDE = 8
#: Bounds are no longer asked for where so many in a row did not fall.
_MOST_FLAT = 8
_MOST_POINTS = 1 << 17
_LEAST_EPSILON, _MOST_EPSILON = 1e-6, 1e4


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
        return threshold(
            lambda epsilon: log_ratio(max(self.deltas(epsilon)), delta),
            1.0,
            relative=relative,
            least=_LEAST_EPSILON,
            most=_MOST_EPSILON,
        )[1]


@dataclasses.dataclass(frozen=True)
class GridLoss:
    """A discrete privacy loss on multiples of a spacing.

    Attributes:
      spacing: h, above 0.
      first: Place of the least finite loss, in spacings.
      masses: Probabilities under P of the losses from there on, shape (n,).
      infinite_mass: Probability of infinite loss under P.
    """

    spacing: float
    first: int
    masses: Array
    infinite_mass: float

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta at ``epsilon``, at least 0."""
        places = self.first + np.arange(len(self.masses))
        gain = -np.expm1(np.minimum(epsilon - places * self.spacing, 0.0))
        finite = float(np.sum(self.masses * gain)) * (1 + _ROUNDING)
        return min(1.0, finite + self.infinite_mass)

    def plus(self, other: GridLoss, least: float) -> GridLoss:
        """Returns the sum of two independent losses.

        Args:
          other: A loss of the same spacing.
          least: Mass at each end that is moved: to infinite loss, and up to the least
            loss that is kept.
        """
        masses = np.convolve(self.masses, other.masses) * (1 + _ROUNDING)
        left = (1 - self.infinite_mass) * (1 - other.infinite_mass)
        found = GridLoss(
            self.spacing, self.first + other.first, masses, (1 - left) * (1 + _ROUNDING)
        )
        return found._without_ends(least)

    def times(self, count: int, least: float) -> GridLoss:
        """Returns the sum of independent copies, by squaring.

        Args:
          count: Number of copies, at least 1.
          least: As for `plus`.
        """
        found, power = None, self
        while True:
            if count & 1:
                found = power if found is None else found.plus(power, least)
            count >>= 1
            if not count:
                assert found is not None  # of a count of at least 1
                return found
            power = power.plus(power, least)

    def _without_ends(self, least: float) -> GridLoss:
        low = int(np.searchsorted(np.cumsum(self.masses), least))
        above = np.cumsum(self.masses[::-1])
        high = len(self.masses) - int(np.searchsorted(above, least))
        if high - low < 2:
            return self
        kept = self.masses[low:high].copy()
        kept[0] += self.masses[:low].sum()
        infinite = self.infinite_mass + float(self.masses[high:].sum())
        return GridLoss(self.spacing, self.first + low, kept, infinite)


def dominating(
    profile: Profile, spacing: float, least: float
) -> tuple[GridLoss, GridLoss]:
    """Returns losses that dominate a mechanism: P against Q, and Q against P.

    Args:
      profile: The mechanism.
      spacing: h, above 0.
      least: A delta that is negligible: larger losses are infinite.
    """
    forward, backward = bounds_on_grid(profile, spacing, least)
    return _loss(forward, backward, spacing), _loss(backward, forward, spacing)


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


def _loss(forward: Array, backward: Array, spacing: float) -> GridLoss:
    """Returns the loss of P against Q.

    Args:
      forward: Bounds of P against Q at the grid points, shape (m,).
      backward: Bounds of Q against P, shape (n,).
      spacing: h, above 0.
    """
    above, infinite = _corners(forward, spacing)
    below, _ = _corners(backward, spacing)
    # The second are masses of Q.
    below *= np.exp(-spacing * np.arange(len(below)))
    masses = np.concatenate([below[:0:-1], [0.0], above[1:]])
    masses[len(below) - 1] = max(0.0, 1.0 - infinite - float(masses.sum()))
    return GridLoss(spacing, 1 - len(below), masses, infinite)


def _corners(bounds: Array, spacing: float) -> tuple[Array, float]:
    """Returns masses of the first distribution at losses above 0, and at infinity.

    Args:
      bounds: On its divergences from the second one, at the grid points, shape (n,).
      spacing: h, above 0.
    """
    ratios = np.exp(spacing * np.arange(len(bounds)))
    kept = _convex(ratios, bounds)
    most = np.interp(ratios, ratios[kept], bounds[kept])
    slopes = np.diff(most[kept]) / np.diff(ratios[kept]) * _MORE
    masses = np.zeros(len(bounds))
    masses[kept[1:]] = np.maximum(np.diff(slopes, append=0.0), 0.0)
    masses *= ratios
    infinite = min(1.0, float(most[-1]) * _MORE)
    above, of_other = (
        np.append(np.cumsum(one[:0:-1])[::-1], 0.0) for one in (masses, masses / ratios)
    )
    if (above - ratios * of_other + infinite < most).any():
        raise ArithmeticError("a discrete loss does not dominate its mechanism")
    return masses, infinite


def _convex(ratios: Array, bounds: Array) -> list[int]:
    """Returns the corners of the greatest convex function below the points."""

    def slope(first: int, last: int) -> float:
        return float((bounds[last] - bounds[first]) / (ratios[last] - ratios[first]))

    kept = [0]
    for place in range(1, len(bounds)):
        while len(kept) > 1 and slope(*kept[-2:]) >= slope(kept[-1], place):
            kept.pop()
        kept.append(place)
    return kept
