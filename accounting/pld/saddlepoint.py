"""Choices for `inversion`: what counts as infinite loss, the contour, and cells.

Made from a cheap quadrature of the exact loss, and the normal approximation of the sum
under an exponential tilt: of order r, a loss l has its probability multiplied by
``e^(r l) / M(r)``.  They decide how tight a bound is, never whether it holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from accounting.numerics.root_finding import threshold
from accounting.pld import inversion
from accounting.pld.inversion import Contour
from accounting.pld.loss_distribution import Atoms

#: Share of delta in what is clipped although it counts.
_CLIPPED = 1e-7
#: Share of the error that is allowed, in what wraps around.
_WRAPPED = 0.1
_LEAST_TERMS = 16
_MOST_TRIES = 50
_LEAST_ORDER, _LARGEST_ORDER = 1e-13, 1e15
#: No tilt moves the mean of a normal sum by more deviations: delta would vanish.
_MOST_DEVIATIONS = 1e3
#: A contour is no nearer to the pole at 0: the mean of its tilt, in deviations of the
#: sum from that without.
_LEAST_TILT = 2.5
_LEAST_DISTANCE = 1e-6
#: Deviations, over the root of 2, from which a normal sum is always above epsilon.
_ALL_ABOVE = -20.0
#: Of a component.
_MOST_CELLS = 1 << 17


@dataclasses.dataclass(frozen=True)
class Focus:
    """What serves a sum of losses that is to be tight at one epsilon.

    Attributes:
      loss: Of one step, clipped.
      num_steps: T.
      epsilon: Where it is to be tight.
      order: Of the tilt whose mean is epsilon, or 0.
      log_delta: About ln delta.
    """

    loss: Atoms
    num_steps: int
    epsilon: float
    order: float
    log_delta: float

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest finite loss."""
        return float(self.loss.losses.min()), float(self.loss.losses.max())


def focus(loss: Atoms, num_steps: int, epsilon: float) -> Focus:
    """Returns a clipped loss, where clipping costs delta next to nothing, and a tilt.

    Args:
      loss: Of one step.
      num_steps: T.
      epsilon: At least 0.
    """
    most = 2 * epsilon + num_steps * float(loss.masses @ np.abs(loss.losses))
    for _ in range(_MOST_TRIES):
        _, mean, variance = loss.clipped(-most, most).cumulants(0.0)
        last = most
        most = 2 * epsilon + 8 * math.sqrt(num_steps * variance) + num_steps * abs(mean)
        if most >= 0.8 * last:
            break
    found = loss.clipped(-most, most)
    order, log_delta = _log_delta(found, num_steps, epsilon)
    tail = math.exp(max(log_delta + math.log(_CLIPPED / num_steps), -640.0))
    low, high = _ends(found, found.masses, tail)
    tilted = _ends(found, found.tilted(order)[0], _CLIPPED**2 / num_steps)
    found = found.clipped(min(low, tilted[0]), max(high, tilted[1]))
    return Focus(found, num_steps, epsilon, *_log_delta(found, num_steps, epsilon))


def _ends(loss: Atoms, masses: NDArray[np.float64], tail: float) -> tuple[float, float]:
    """Returns what leaves out ``tail`` of the masses on either side."""
    order = np.argsort(loss.losses)
    losses, masses = loss.losses[order], masses[order]
    first = int(np.searchsorted(np.cumsum(masses), tail))
    last = int(np.searchsorted(np.cumsum(masses[::-1]), tail))
    end = len(losses) - 1
    return float(losses[min(first, end)]), float(losses[::-1][min(last, end)])


def order_for_epsilon(loss: Atoms, num_steps: int, epsilon: float) -> float:
    """Returns the order whose tilt puts the mean of the sum at ``epsilon``.

    Args:
      loss: Of one step.
      num_steps: T.
      epsilon: At least 0.
    """
    _, mean, variance = loss.cumulants(0.0)
    if num_steps * mean >= epsilon:
        return 0.0
    most = _most_order(loss, num_steps)
    guess = (epsilon - num_steps * mean) / max(num_steps * variance, 1e-100)
    return _order(
        lambda r: num_steps * loss.cumulants(r)[1] - epsilon, min(guess, most), most
    )


def _most_order(loss: Atoms, num_steps: int) -> float:
    deviation = math.sqrt(num_steps * loss.cumulants(0.0)[2])
    return _MOST_DEVIATIONS / max(deviation, 1e-100)


def _order(
    excess: Callable[[float], float], guess: float, most: float = _LARGEST_ORDER
) -> float:
    # ``excess`` increases with the order.  The result is a choice, not a bound: three
    # digits are enough.
    _, high = threshold(
        lambda order: -excess(order),
        guess,
        relative=1e-3,
        stride=1.2,
        least=_LEAST_ORDER,
        most=most,
    )
    return min(high, most)


def _log_delta(loss: Atoms, num_steps: int, epsilon: float) -> tuple[float, float]:
    """Returns the order for ``epsilon``, and about ln delta."""
    order = order_for_epsilon(loss, num_steps, epsilon)
    infinite = math.log(max(num_steps * loss.infinite_mass, 1e-300))
    finite = _log_tail(loss, num_steps, order, epsilon)
    return order, min(float(np.logaddexp(finite, infinite)), 0.0)


def _log_tail(loss: Atoms, num_steps: int, order: float, epsilon: float) -> float:
    """Returns about ln delta of the finite losses, whose sum is taken to be normal."""
    log_moment, mean, variance = loss.cumulants(order)
    log_gain = _log_gain(order, num_steps * mean - epsilon, num_steps * variance)
    return num_steps * log_moment - order * epsilon + log_gain


def _log_gain(order: float, above: float, variance: float) -> float:
    """Returns ``ln E[e^(-r X) (1 - e^-X)+]`` for a normal X.

    Args:
      order: r.
      above: The mean of X.
      variance: Of X.
    """
    width = math.sqrt(2 * max(variance, 1e-200))
    place = order * width / 2 - above / width
    if place < _ALL_ABOVE:  # where erfcx overflows: two moments of a normal
        exponent = min(width * place + width**2 / 4, -1e-300)
        return order * (order * variance / 2 - above) + math.log(-math.expm1(exponent))
    near = float(special.erfcx(place))
    gain = near - float(special.erfcx(place + width / 2))
    if width < 1e-6:
        # The slope of erfcx, where it is narrow.
        gain = width * (1 / math.sqrt(math.pi) - place * near)
    return math.log(max(gain / 2, 1e-300)) - (above / width) ** 2


def approximate_log_delta(loss: Atoms, num_steps: int, epsilon: float) -> float:
    """Returns about ln delta; no bound.

    Args:
      loss: Of one step.
      num_steps: T.
      epsilon: At least 0.
    """
    return _log_delta(loss, num_steps, epsilon)[1]


def approximate_epsilon(loss: Atoms, num_steps: int, delta: float) -> float:
    """Returns about the epsilon of ``delta``; 0 where less would do.

    Args:
      loss: Of one step.
      num_steps: T.
      delta: In (0, 1).
    """
    # Along the tilts, epsilon is the mean of the sum.
    needed = math.log(delta)

    def excess(order: float) -> float:
        mean = num_steps * loss.cumulants(order)[1]
        return needed - _log_tail(loss, num_steps, order, mean)

    _, _, variance = loss.cumulants(0.0)
    guess = 1 / max(math.sqrt(num_steps * variance), 1e-100)
    order = _order(excess, guess, _MOST_DEVIATIONS * guess)
    return max(0.0, num_steps * loss.cumulants(order)[1])


@dataclasses.dataclass(frozen=True)
class Cost:
    """What decides how fine a contour has to be.

    Attributes:
      curvature: The density of the sum at epsilon over delta.
      log_share: ln of delta over the Chernoff bound of the contour's order.
    """

    curvature: float
    log_share: float

    def exceeds(self, other: Cost, factor: float) -> bool:
        """Returns whether choices made for another cost are too coarse.

        Args:
          other: The other cost.
          factor: By which they may be.
        """
        too_near = self.log_share < other.log_share - 2.0
        return too_near or self.curvature > factor * other.curvature

    def or_more(self, other: Cost) -> Cost:
        """Returns what covers both costs."""
        curvature = max(self.curvature, other.curvature)
        return Cost(curvature, min(self.log_share, other.log_share))


def contour_order(found: Focus) -> float:
    """Returns r: that of the tilt, unless it is too near to the pole at 0."""
    _, mean, variance = found.loss.cumulants(0.0)
    steps = found.num_steps
    deviation = math.sqrt(steps * variance)
    away = steps * mean + _LEAST_TILT * deviation
    if away <= found.epsilon:
        return found.order
    # The former is less for skewed losses, the latter for bounded ones.
    least = order_for_epsilon(found.loss, steps, away)
    if least <= 0.0:  # the sum hardly varies: its distance is all that there is
        least = 1 / max(steps * mean - found.epsilon, _LEAST_DISTANCE)
    return max(found.order, min(least, _LEAST_TILT / max(deviation, 1e-100)))


def expected_cost(found: Focus) -> Cost:
    """Returns what a normal sum would cost."""
    order = contour_order(found)
    variance = found.loss.cumulants(found.order)[2]
    slope = found.order + 1 / math.sqrt(max(found.num_steps * variance, 1e-200))
    log_chernoff = found.num_steps * found.loss.cumulants(order)[0]
    log_share = found.log_delta - (log_chernoff - order * found.epsilon)
    return Cost(slope * (slope + 1), min(log_share, 0.0))


def contour(found: Focus, cost: Cost, fineness: float) -> Contour:
    """Returns a contour that adds a share of about ``fineness`` to delta.

    Args:
      found: The sum.
      cost: What is known of it.
      fineness: Relative to delta.
    """
    order = contour_order(found)
    needed = -math.log(_WRAPPED * fineness) - cost.log_share
    period = _period(found, order, needed)
    # More would also raise the Chernoff bound.
    variance = min(2 * fineness / cost.curvature, 0.5 / (order * (order + 1)))
    last = math.sqrt(2 * needed / variance)
    count = max(math.ceil(last * period / (2 * math.pi)), _LEAST_TERMS)
    count = min(count, inversion.MOST_TERMS)
    if found.num_steps * found.ends[1] <= found.epsilon:
        count = _LEAST_TERMS  # no finite sum is larger: Chernoff's bound is enough
    return Contour(order=order, period=period, variance=variance, count=count)


def _period(found: Focus, order: float, needed: float) -> float:
    """Returns W so large that delta at ``epsilon +- W`` hardly counts.

    Chernoff: ``E_r[e^(-r X)+] <= E_r[e^(h X)]`` for h >= -r, of X = S - epsilon -+ W.
    """
    weights, _ = found.loss.tilted(order)
    kept = weights > 1e-40
    log_weights = np.log(weights[kept])
    steps = found.num_steps
    centred = found.loss.losses[kept] - found.epsilon / steps
    variance = steps * float(weights[kept] @ centred**2)
    scale = math.sqrt(2 * needed / max(variance, 1e-200))

    def width(rate: float) -> float:
        exponents = rate * centred
        if float(np.abs(exponents).max()) < 1.0:
            moment = math.log1p(float(weights[kept] @ np.expm1(exponents)))
        else:
            moment = float(special.logsumexp(exponents + log_weights))
        return (steps * moment + needed) / abs(rate)

    def least(sign: float, most: float) -> float:
        ends = math.log(min(most, scale / 30)), math.log(min(most, scale * 10))
        if ends[0] == ends[1]:
            return width(sign * most)
        found = optimize.minimize_scalar(
            lambda log_rate: width(sign * math.exp(log_rate)),
            bounds=ends,
            method="bounded",
            options={"xatol": 0.05},
        )
        return float(found.fun)

    return max(least(1.0, math.inf), min(least(-1.0, order), width(-order)))


def flows(
    found: Focus, cost: Cost, fineness: float, parts: list[Atoms]
) -> list[NDArray[np.float64]]:
    """Returns how many cells are to lie below each atom of each part of a mixture.

    Cells between whose ends losses are split add ``p w^2 / 6`` to the variance of a
    loss, for a cell of width w and mass p under the tilt: least for a given number of
    cells where ``p w^2`` is the same in all.

    Args:
      found: The sum.
      cost: What is known of it.
      fineness: What may be added to delta, relatively.
      parts: Of the quadrature of each component, with increasing losses.
    """
    low, high = found.ends
    log_moment = found.loss.tilted(found.order)[1]
    # No cell may be wider than what one loss alone may be split to.
    widest = math.sqrt(8 * fineness / cost.curvature)
    shares, steady = [], []
    for part in parts:
        losses = np.clip(part.losses, low, high)
        width = np.diff(losses, append=losses[-1])
        with np.errstate(divide="ignore", under="ignore"):
            exponents = np.log(part.masses) + found.order * losses - log_moment
            masses = np.exp(exponents - np.maximum(part.losses - high, 0.0))
        shares.append(np.cumsum(np.cbrt(masses * width**2)))
        steady.append(np.cumsum(np.where(masses > 1e-18, width / widest, 0.0)))
    total = max(sum(float(share[-1]) for share in shares), 1e-300)
    quantum = math.sqrt(12 * fineness / (found.num_steps * cost.curvature * total))
    counts = [one / quantum + two for one, two in zip(shares, steady, strict=True)]
    excess = max(1.0, max(float(count[-1]) for count in counts) / _MOST_CELLS)
    return [count / excess for count in counts]


def found_cost(total: inversion.LaplaceSum, epsilon: float) -> Cost:
    """Returns what a sum cost at ``epsilon``.

    Args:
      total: Of all losses.
      epsilon: At least 0.
    """
    mean = max(total.mean(epsilon), total.error, 1e-300)
    return Cost(max(total.density(epsilon), 0.0) / mean, math.log(mean))
