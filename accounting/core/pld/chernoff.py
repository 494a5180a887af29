"""Chernoff's bound on delta of a sum of losses, for tiny deltas (`LEAST_TIGHT_DELTA`).

With ``M(r) = E[e^(r L)]`` and S the sum of T independent losses under P, for any r > 0

    delta(eps) = E[(1 - e^(eps - S))+] <= c(r) M(r)^T e^(-r eps),
    c(r) = max over y > 0 of (1 - e^-y) e^(-r y) = r^r / (1 + r)^(1 + r).

It is looser than `inversion` by a factor of some ten in delta, a few percent in
epsilon, and it has no term that is added: it is right at any delta.  Losses are split
between the same cells, and r is from the same list, whatever is asked: so the bound on
epsilon falls with delta, as the bound on delta does with epsilon.

References:
  Abadi et al. (2016), arXiv:1607.00133, for the moments of a sum; Canonne, Kamath and
  Steinke (2020), arXiv:2004.00010, Proposition 12, for c(r).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable

import numpy as np

from accounting.core.numerics.sums import inner
from accounting.core.pld import loss_distribution
from accounting.core.pld.dominating_pairs import Step
from accounting.core.pld.inversion import UNIT
from accounting.core.pld.loss_distribution import Atoms

_ORDERS = np.geomspace(1e-3, 1e6, 400)
#: Width of a cell in noise standard deviations: with the four nodes of
#: `dominating_pairs`, even the density 37 of them from its mean is integrated with a
#: relative error far below that of rounding.
_WIDTH = 0.0125
#: More than the relative error of a mass, and of the sum of all.
_QUADRATURE = 1e-12


class Chernoff:
    """The bound for T steps.

    Attributes:
      step: Mixture of dominating pairs.
      num_steps: T.
    """

    def __init__(self, step: Step, num_steps: int) -> None:
        self.step = step
        self.num_steps = num_steps
        self._log_factors: dict[int, float] = {}

    @functools.cached_property
    def _loss(self) -> Atoms:
        """A discrete loss that dominates the exact loss of one step."""
        parts = []
        for weight, pair in self.step:
            low, high = loss_distribution.support(pair)
            count = 2 + int((high - low) / (_WIDTH * pair.noise_multiplier))
            edges = np.linspace(low, high, count)
            loss = loss_distribution.spread(pair, edges, -math.inf, math.inf)
            parts.append((weight, loss))
        return loss_distribution.mix(parts)

    def _log_factor(self, place: int) -> float:
        """Returns ``ln(c(r) M(r)^T)`` of an order, rounded up."""
        if place not in self._log_factors:
            order = float(_ORDERS[place])
            weights, log_moment = self._loss.tilted(order)
            mean_size = inner(weights, np.abs(self._loss.losses))
            rounding = 4 * order * mean_size + 16 * abs(log_moment)
            log_moment += _QUADRATURE + UNIT * rounding
            log_share = order * math.log(order) - (order + 1) * math.log1p(order)
            self._log_factors[place] = self.num_steps * log_moment + log_share
        return self._log_factors[place]

    def _least(self, of_order: Callable[[float, float], float]) -> float:
        """Returns the least value over all orders.

        ``ln(c(r) M(r)^T)`` is convex in r, so values fall and then rise.

        Args:
          of_order: (r, ``ln(c(r) M(r)^T)``) -> value.
        """

        def value(place: int) -> float:
            return of_order(float(_ORDERS[place]), self._log_factor(place))

        places = range(len(_ORDERS) - 1)
        return value(
            bisect.bisect_left(places, True, key=lambda i: value(i + 1) >= value(i))
        )

    @property
    def _infinite(self) -> float:
        """The probability of infinite loss in any step, rounded up."""
        return min(1.0, self.num_steps * self._loss.infinite_mass * (1 + 1e-9))

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta at ``epsilon``."""
        exponent = self._least(lambda order, factor: factor - order * epsilon)
        return min(1.0, math.exp(min(exponent, 0.0)) + self._infinite)

    def epsilon(self, delta: float) -> float:
        """Returns an upper bound on epsilon at ``delta``; infinite if there is none."""
        left = delta - self._infinite
        if left <= 0.0:
            return math.inf
        log_left = math.log(left)
        found = self._least(lambda order, factor: (factor - log_left) / order)
        return max(0.0, found * (1 + 1e-12))
