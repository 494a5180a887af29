"""The privacy profile of T independent steps, each a mixture of dominating pairs.

Chooses order and spacing for `composition.compose` from a cheap quadrature of the exact
loss.  Those choices decide how tight a bound is, never whether it holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.numerics.root_finding import threshold
from accounting.pld import composition, loss_distribution
from accounting.pld.dominating_pairs import Step

#: Variance that the grid may add, relative to that of the loss under the tilt.  At the
#: published settings epsilon is then at most 0.01 %, 0.02 % and 0.2 % above its limit.
FINE = 3e-6
MEDIUM = 1e-5
COARSE = 1e-4
#: Points of a transform in the early steps of a search.
_COARSE_POINTS = 1 << 18
_LEAST_ORDER, _LARGEST_ORDER = 1e-13, 1e9
_LEAST_TAIL = 1e-280


@dataclasses.dataclass(frozen=True)
class Atoms:
    """Quadrature of the exact loss of one step: masses under P and losses."""

    masses: NDArray[np.float64]
    losses: NDArray[np.float64]

    def cumulants(self, order: float) -> tuple[float, float, float]:
        """Returns ``ln E[e^(order L)]`` and its first two derivatives."""
        largest = float((order * self.losses).max())
        if abs(largest) < 1.0 and order * float(self.losses.min()) > -1.0:
            weights = self.masses * np.exp(order * self.losses)
            excess = float(self.masses @ np.expm1(order * self.losses))
            log_moment = math.log1p(excess)
        else:
            weights = self.masses * np.exp(order * self.losses - largest)
            log_moment = largest + math.log(max(float(weights.sum()), 1e-300))
        weights = weights / max(float(weights.sum()), 1e-300)
        mean = float(weights @ self.losses)
        return log_moment, mean, float(weights @ (self.losses - mean) ** 2)


def atoms(step: Step, tail_mass: float) -> Atoms:
    """Returns the quadrature of a mixture of pairs, but for its rarest losses.

    Args:
      step: A mixture of pairs.
      tail_mass: Probability that may be left out on either side.
    """
    masses, losses = [], []
    for weight, pair in step:
        mass, loss = pair.atoms(np.array(pair.support(_share(tail_mass, weight))))
        masses.append(weight * mass)
        losses.append(loss)
    return Atoms(np.concatenate(masses), np.concatenate(losses))


def _share(tail_mass: float, weight: float) -> float:
    """Returns the tail of a component that is ``tail_mass`` of the mixture."""
    return min(max(tail_mass / weight, _LEAST_TAIL), 0.25)


def _order(excess: Callable[[float], float]) -> float:
    # ``excess`` increases with the order.  The result is a choice, not a bound: three
    # digits are enough.
    _, high = threshold(
        lambda order: -excess(order),
        1.0,
        relative=1e-3,
        least=_LEAST_ORDER,
        most=_LARGEST_ORDER,
    )
    return min(high, _LARGEST_ORDER)


def order_for_epsilon(loss: Atoms, num_steps: int, epsilon: float) -> float:
    """Returns the order whose tilt puts the mean of the sum at ``epsilon``.

    Args:
      loss: Of one step.
      num_steps: T.
      epsilon: At least 0.
    """
    if num_steps * loss.cumulants(0.0)[1] >= epsilon:
        return 0.0
    return _order(lambda r: num_steps * loss.cumulants(r)[1] - epsilon)


def order_for_delta(loss: Atoms, num_steps: int, delta: float) -> float:
    """Returns the order that minimises the Renyi bound on epsilon at ``delta``.

    Args:
      loss: Of one step.
      num_steps: T.
      delta: In (0, 1).
    """
    needed = -math.log(delta)

    def excess(order: float) -> float:
        log_moment, mean, _ = loss.cumulants(order)
        return num_steps * (order * mean - log_moment) - needed

    return _order(excess)


def approximate_log_delta(step: Step, num_steps: int, epsilon: float) -> float:
    """Returns an approximation of ln delta, for the start of a search; no bound.

    Args:
      step: A mixture of pairs.
      num_steps: T.
      epsilon: At least 0.
    """
    return approximate_log_tail(atoms(step, 1e-40), num_steps, epsilon)


def approximate_log_tail(loss: Atoms, num_steps: int, epsilon: float) -> float:
    """Returns `approximate_log_delta` of the loss of one step.

    The sum of losses is taken to be normal under the tilt that centres it on epsilon.

    Args:
      loss: Of one step.
      num_steps: T.
      epsilon: At least 0.
    """
    order = order_for_epsilon(loss, num_steps, epsilon)
    log_moment, _, variance = loss.cumulants(order)
    width = math.sqrt(num_steps * variance / 2)
    mean = special.erfcx(order * width) - special.erfcx((order + 1) * width)
    chernoff = min(0.0, num_steps * log_moment - order * epsilon)
    return chernoff + math.log(max(float(mean) / 2, 1e-300))


def _tail_mass(log_delta: float, num_steps: int, share: float) -> float:
    """Returns the infinite loss to give one step: ``share`` of delta in all."""
    log_tail = log_delta + math.log(share / num_steps)
    return math.exp(min(max(log_tail, math.log(_LEAST_TAIL)), -20.0))


def _spacing(
    step: Step, loss: Atoms, num_steps: int, order: float, fineness: float
) -> float:
    """Returns a spacing that adds a share of ``fineness`` to the variance of the loss.

    Rare components with large losses dominate that variance without mattering to the
    result: the most probable component, at the same order, has a say of its own.
    """
    variance = loss.cumulants(order)[2]
    share, main = max(step, key=lambda part: part[0])
    least = variance
    if share < 1.0:
        least = min(variance, atoms([(1.0, main)], 1e-20).cumulants(order)[2])
    spacing = min(math.sqrt(6 * fineness * least), 0.02 / (1 + order))
    window = 18 * math.sqrt(num_steps * variance)
    return max(spacing, window / _max_points(fineness), 1e-100)


def _max_points(fineness: float) -> int:
    return _COARSE_POINTS if fineness >= COARSE else composition.MAX_POINTS


def composed(
    step: Step, num_steps: int, order: float, tail_mass: float, fineness: float
) -> composition.TiltedSum:
    """Returns a pessimistic sum of the losses of ``num_steps`` steps.

    Args:
      step: A mixture of pairs.
      num_steps: T.
      order: Of the tilt.
      tail_mass: Infinite loss that one step may be given.
      fineness: As of a `Profile`.
    """
    loss = atoms(step, tail_mass)
    spacing = _spacing(step, loss, num_steps, order, fineness)
    tails = [_share(tail_mass, weight) for weight, _ in step]
    for (_, pair), tail in zip(step, tails, strict=True):
        ends = pair.loss(np.array(pair.support(tail)))
        spacing = max(spacing, loss_distribution.least_spacing(ends))

    def step_on(spacing: float) -> loss_distribution.LossDistribution:
        return loss_distribution.mix(
            [
                (weight, loss_distribution.discretize(pair, spacing, tail))
                for (weight, pair), tail in zip(step, tails, strict=True)
            ]
        )

    return composition.compose_coarsened(
        step_on, spacing, num_steps, order, _max_points(fineness), fold=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """An upper bound on delta as a function of epsilon, over both directions.

    Attributes:
      directions: The step with the real example first, and with the ghost first; each a
        public mixture of dominating pairs.
      num_steps: T.
      fineness: Variance the grid may add; ``FINE``, ``MEDIUM`` or ``COARSE``.
    """

    directions: tuple[Step, ...]
    num_steps: int
    fineness: float = FINE

    def delta(self, epsilon: float) -> float:
        """Returns a delta >= 0 at which ``(epsilon, delta)`` is proven."""
        worst = 0.0
        for step in self.directions:
            worst = max(worst, self._delta(step, epsilon, worst))
        return worst

    def delta_by_direction(self, epsilon: float) -> tuple[float, ...]:
        """Returns an upper bound on delta in each direction."""
        return tuple(self._delta(step, epsilon, 0.0) for step in self.directions)

    def _delta(self, step: Step, epsilon: float, worst: float) -> float:
        """Returns a bound in the direction of ``step``; 0 if it is below ``worst``."""
        loss = atoms(step, _LEAST_TAIL)
        order = order_for_epsilon(loss, self.num_steps, epsilon)
        log_delta = self.num_steps * loss.cumulants(order)[0] - order * epsilon
        # The Chernoff bound alone may show that this direction is not the worse.
        if worst > 0.0 and log_delta < math.log(worst) - 1e-6:
            return 0.0
        tail_mass = _tail_mass(log_delta, self.num_steps, 1e-8)
        loss = atoms(step, tail_mass)
        order = order_for_epsilon(loss, self.num_steps, epsilon)
        total = composed(step, self.num_steps, order, tail_mass, self.fineness)
        return total.delta(epsilon)

    def sums_at(self, delta: float) -> tuple[composition.TiltedSum, ...]:
        """Returns the sums of losses in each direction, tilted for ``delta``."""
        tail_mass = _tail_mass(math.log(delta), self.num_steps, 1e-6)
        sums = []
        for step in self.directions:
            order = order_for_delta(atoms(step, tail_mass), self.num_steps, delta)
            sums.append(composed(step, self.num_steps, order, tail_mass, self.fineness))
        return tuple(sums)

    def epsilon(self, delta: float) -> float:
        """Returns an epsilon >= 0 at which ``(epsilon, delta)`` is proven."""
        return max(total.epsilon(delta) for total in self.sums_at(delta))
