"""Epsilon of several mechanisms on the same rows, from their profiles.

Formal guarantees:
  - epsilon and delta are upper bounds for both directions, if each mechanism's profile
    is fixed before anything is released; what is done within a profile may depend on
    earlier releases.
  - *not* covered: a mechanism whose profile is chosen after something was released.
    Stopping when a composed epsilon is reached is no remedy: such filters are not valid
    for privacy profiles (arXiv:2602.06756).  `after` adds its epsilon and its delta.

Public: everything.

References:
  Zhu, Dong and Wang (2022), arXiv:2106.08567, Theorem 10, for the composition of
  dominating pairs; Rogers, Roth, Ullman and Vadhan (2016), arXiv:1605.08294, for plain
  addition under full adaptivity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from accounting.composition.loss_grid import GridLoss, Profile, dominating
from accounting.core.numerics.root_finding import log_ratio, threshold

#: Grid points per epsilon of the part that has the largest one.
_POINTS = 600
#: Masses below this share of delta are cut off, on the private side.
_CUT = 1e-8
_LEAST_SCALE = 1e-6
#: Relative error of a search for epsilon.
_RELATIVE = 1e-6


class Composition:
    """Mechanisms that are run one after another on the same rows.

    Attributes:
      parts: Profiles, each with the number of times that it is run.
    """

    def __init__(self, parts: Sequence[tuple[Profile, int]]) -> None:
        self.parts = tuple(parts)

    def epsilon(self, delta: float) -> float:
        """Returns an upper bound on epsilon; infinite if none is proven.

        Args:
          delta: In (0, 1).
        """
        share = delta / sum(count for _, count in self.parts)
        alone = [max(one.epsilon(share, 0.05), _LEAST_SCALE) for one, _ in self.parts]
        if math.isinf(max(alone)):
            return math.inf
        totals = self._totals(max(alone) / _POINTS, delta)
        if max(total.infinite_mass for total in totals) >= delta:
            return math.inf
        return threshold(
            lambda epsilon: log_ratio(
                max(total.delta(epsilon) for total in totals), delta
            ),
            max(alone),
            relative=_RELATIVE,
            stride=1.1,
            least=_LEAST_SCALE * _RELATIVE,
        )[1]

    def _totals(self, spacing: float, delta: float) -> tuple[GridLoss, ...]:
        """Returns the sum of all losses in each direction."""
        least = _CUT * delta
        found: list[GridLoss] = []
        for profile, count in self.parts:
            both = dominating(profile, spacing, least)
            copies = [one.times(count, least) for one in both]
            found = (
                copies
                if not found
                else [
                    total.plus(one, least)
                    for total, one in zip(found, copies, strict=True)
                ]
            )
        return tuple(found)
