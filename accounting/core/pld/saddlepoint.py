"""Parameters of `inversion`: what counts as infinite loss, its contour, and cells.

They use a cheap quadrature of the exact loss, and the normal approximation of the sum
under an exponential tilt: a tilt of order r multiplies the probability of a loss l by
``e^(r l) / M(r)``.  They decide how tight a bound is, never whether it holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from accounting.core.numerics import inner, threshold
from accounting.core.pld import inversion
from accounting.core.pld.dominating_pairs import Atoms
from accounting.core.pld.inversion import Contour

#: Largest relative addition to delta from clipping.
_CLIPPED = 1e-7
#: Share of it for what counts as infinite loss in one of many components.
_NEVER = 1e-2
#: Share of the allowed error for wrapping.
_WRAPPED = 0.1
_LEAST_TERMS = 16
_MOST_TRIES = 50
_LEAST_ORDER, _LARGEST_ORDER = 1e-13, 1e15
#: Largest shift of the mean by a tilt, in standard deviations of the sum: beyond it
#: delta would vanish.
_MOST_DEVIATIONS = 1e3
#: Least distance of a contour from the pole at 0: the shift of the mean under its tilt,
#: in standard deviations of the sum.
_LEAST_TILT = 2.5
#: Largest product of the order and of how far epsilon is below the mean of the sum.
#: Chernoff's bound, to which errors are relative, exceeds delta by its exponential.
_MOST_EXCESS = 10.0
_LEAST_DISTANCE = 1e-6
#: Epsilon minus mean, in standard deviations over the root of 2, below which a normal
#: sum always exceeds epsilon.
_ALL_ABOVE = -20.0
#: Largest number of cells of a component.
_MOST_CELLS = 1 << 17


@dataclasses.dataclass(frozen=True)
class Focus:
    """A sum of losses, and the epsilon at which its bound has to be tight.

    Attributes:
      loss: Loss of one step, clipped.
      num_steps: T.
      epsilon: At least 0.
      order: Order of the tilt under which the mean of the sum is epsilon; 0 if the mean
        without a tilt is larger.
      log_delta: Approximation of ln delta.
      log_finite: The same without infinite losses.
    """

    loss: Atoms
    num_steps: int
    epsilon: float
    order: float
    log_delta: float
    log_finite: float

    @property
    def ends(self) -> tuple[float, float]:
        """Smallest and largest finite loss."""
        return float(self.loss.losses.min()), float(self.loss.losses.max())

    def kept(self, part: Atoms) -> tuple[int, int]:
        """Returns the places of two losses beyond which hardly anything counts.

        Smaller losses are the smallest finite one; larger ones are too improbable.

        Args:
          part: Quadrature of one component of the loss, with increasing losses.
        """
        most = len(part.losses) - 1
        first = int(np.searchsorted(part.losses, self.ends[0], "right")) - 1
        above = np.cumsum(part.masses[::-1])
        tail = _NEVER * _tail(self.log_delta, self.num_steps)
        last = most - int(np.searchsorted(above, tail))
        first, last = max(first, 0), min(last + 1, most)
        return (first, last) if first < last else (0, most)


def focus(loss: Atoms, num_steps: int, epsilon: float) -> Focus:
    """Returns a clipped loss, whose clipping hardly adds to delta, and a tilt.

    Args:
      loss: Loss of one step.
      num_steps: T.
      epsilon: At least 0.
    """
    most = 2 * epsilon + num_steps * inner(loss.masses, np.abs(loss.losses))
    for _ in range(_MOST_TRIES):
        _, mean, variance = loss.clipped(-most, most).cumulants(0.0)
        last = most
        most = 2 * epsilon + 8 * math.sqrt(num_steps * variance) + num_steps * abs(mean)
        if most >= 0.8 * last:
            break
    found = loss.clipped(-most, most)
    order, log_delta, _ = _log_delta(found, num_steps, epsilon)
    low, high = _ends(found, found.masses, _tail(log_delta, num_steps))
    tilted = _ends(found, found.tilted(order)[0], _CLIPPED**2 / num_steps)
    found = found.clipped(min(low, tilted[0]), max(high, tilted[1]))
    return Focus(found, num_steps, epsilon, *_log_delta(found, num_steps, epsilon))


def _tail(log_delta: float, num_steps: int) -> float:
    """Returns a probability in one step that hardly adds to delta."""
    return math.exp(max(log_delta + math.log(_CLIPPED / num_steps), -640.0))


def _ends(loss: Atoms, masses: NDArray[np.float64], tail: float) -> tuple[float, float]:
    """Returns an interval of losses outside of which the mass is ``tail`` per side."""
    order = np.argsort(loss.losses)
    losses, masses = loss.losses[order], masses[order]
    first = int(np.searchsorted(np.cumsum(masses), tail))
    last = int(np.searchsorted(np.cumsum(masses[::-1]), tail))
    end = len(losses) - 1
    return float(losses[min(first, end)]), float(losses[::-1][min(last, end)])


def order_for_epsilon(loss: Atoms, num_steps: int, epsilon: float) -> float:
    """Returns the order of the tilt that moves the mean of the sum to ``epsilon``.

    Args:
      loss: Loss of one step.
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
    # digits suffice.
    _, high = threshold(
        lambda order: -excess(order),
        guess,
        relative=1e-3,
        stride=1.2,
        least=_LEAST_ORDER,
        most=most,
    )
    return min(high, most)


def _log_delta(
    loss: Atoms, num_steps: int, epsilon: float
) -> tuple[float, float, float]:
    """Returns `Focus.order`, `Focus.log_delta` and `Focus.log_finite`."""
    if not loss.masses.any():  # every loss is infinite: next to no noise
        return 0.0, 0.0, -math.inf
    order = order_for_epsilon(loss, num_steps, epsilon)
    infinite = math.log(max(num_steps * loss.infinite_mass, 1e-300))
    finite = _log_tail(loss, num_steps, order, epsilon)
    return order, min(float(np.logaddexp(finite, infinite)), 0.0), finite


def _log_tail(loss: Atoms, num_steps: int, order: float, epsilon: float) -> float:
    """Returns an approximation of ln delta of the finite losses, with a normal sum."""
    log_moment, mean, variance = loss.cumulants(order)
    log_gain = _log_gain(order, num_steps * mean - epsilon, num_steps * variance)
    return num_steps * log_moment - order * epsilon + log_gain


def _log_gain(order: float, above: float, variance: float) -> float:
    """Returns ``ln E[e^(-r X) (1 - e^-X)+]`` for a normal X.

    Args:
      order: r.
      above: Mean of X.
      variance: Variance of X.
    """
    width = math.sqrt(2 * max(variance, 1e-200))
    place = order * width / 2 - above / width
    if place < _ALL_ABOVE:  # erfcx overflows: two moments of a normal
        exponent = min(width * place + width**2 / 4, -1e-300)
        return order * (order * variance / 2 - above) + math.log(-math.expm1(exponent))
    near = float(special.erfcx(place))
    gain = near - float(special.erfcx(place + width / 2))
    if width < 1e-6:
        # The difference is the slope of erfcx times the width.
        gain = width * (1 / math.sqrt(math.pi) - place * near)
    return math.log(max(gain / 2, 1e-300)) - (above / width) ** 2


def approximate_log_delta(loss: Atoms, num_steps: int, epsilon: float) -> float:
    """Returns an approximation of ln delta.

    Args:
      loss: Loss of one step.
      num_steps: T.
      epsilon: At least 0.
    """
    return _log_delta(loss, num_steps, epsilon)[1]


def approximate_epsilon(loss: Atoms, num_steps: int, delta: float) -> float:
    """Returns an approximation of epsilon at ``delta``, at least 0.

    Args:
      loss: Loss of one step.
      num_steps: T.
      delta: In (0, 1).
    """
    # The search is over tilts; epsilon is the mean of the sum under the tilt.
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
    """Properties of a sum that determine how fine a contour has to be.

    Attributes:
      curvature: Density of the sum at epsilon over delta.
      log_share: ln of delta over the Chernoff bound of the contour's order.
    """

    curvature: float
    log_share: float

    def exceeds(self, other: Cost, factor: float) -> bool:
        """Returns whether choices made for another cost are too coarse.

        Args:
          other: The other cost.
          factor: Largest accepted ratio of the curvatures.
        """
        too_near = self.log_share < other.log_share - 2.0
        return too_near or self.curvature > factor * other.curvature

    def or_more(self, other: Cost) -> Cost:
        """Returns a cost that covers both."""
        curvature = max(self.curvature, other.curvature)
        return Cost(curvature, min(self.log_share, other.log_share))


def contour_order(found: Focus) -> float:
    """Returns r: the order of the tilt, unless that is too near the pole at 0."""
    _, mean, variance = found.loss.cumulants(0.0)
    steps = found.num_steps
    deviation = math.sqrt(steps * variance)
    away = steps * mean + _LEAST_TILT * deviation
    if away <= found.epsilon and found.order > 0.0:
        return found.order
    # Of three orders, the first is the smallest for skewed losses, the second for
    # bounded ones, the third for losses that hardly vary.
    least = order_for_epsilon(found.loss, steps, away)
    if least <= 0.0:  # the sum hardly varies: the only scale is its distance
        least = 1 / max(steps * mean - found.epsilon, _LEAST_DISTANCE)
    excess = max(steps * mean - found.epsilon, 1e-100)
    bounded = _LEAST_TILT / max(deviation, 1e-100)
    return max(found.order, min(least, bounded, _MOST_EXCESS / excess))


def expected_cost(found: Focus) -> Cost:
    """Returns the cost of a normal sum."""
    order = contour_order(found)
    variance = found.loss.cumulants(found.order)[2]
    slope = found.order + 1 / math.sqrt(max(found.num_steps * variance, 1e-200))
    log_chernoff = found.num_steps * found.loss.cumulants(order)[0]
    log_share = found.log_delta - (log_chernoff - order * found.epsilon)
    finite = math.exp(min(max(found.log_finite - found.log_delta, -20.0), 0.0))
    return Cost(finite * slope * (slope + 1), min(log_share, 0.0))


def contour(found: Focus, cost: Cost, fineness: float) -> Contour:
    """Returns a contour whose relative addition to delta is about ``fineness``.

    Args:
      found: The sum.
      cost: Known properties of the sum.
      fineness: Relative addition to delta.
    """
    order = contour_order(found)
    needed = -math.log(_WRAPPED * fineness) - cost.log_share
    period = _period(found, order, needed)
    # A larger variance would also raise the Chernoff bound.
    variance = min(2 * fineness / cost.curvature, 0.5 / (order * (order + 1)))
    last = math.sqrt(2 * needed / variance)
    count = max(math.ceil(last * period / (2 * math.pi)), _LEAST_TERMS)
    count = min(count, inversion.MOST_TERMS)
    if found.num_steps * found.ends[1] <= found.epsilon:
        count = _LEAST_TERMS  # no finite sum is larger: Chernoff's bound is enough
    return Contour(order=order, period=period, variance=variance, count=count)


def _period(found: Focus, order: float, needed: float) -> float:
    """Returns a period W so large that delta at ``epsilon +- W`` is negligible.

    Chernoff: ``E_r[e^(-r X)+] <= E_r[e^(h X)]`` for h >= -r, of X = S - epsilon -+ W.
    """
    weights, _ = found.loss.tilted(order)
    kept = weights > 1e-40
    weights = weights[kept]
    log_weights = np.log(weights)
    steps = found.num_steps
    centred = found.loss.losses[kept] - found.epsilon / steps
    variance = steps * inner(weights, centred**2)
    scale = math.sqrt(2 * needed / max(variance, 1e-200))

    def width(rate: float) -> float:
        exponents = rate * centred
        if float(np.abs(exponents).max()) < 1.0:
            moment = math.log1p(inner(weights, np.expm1(exponents)))
        else:
            exponents += log_weights
            largest = float(exponents.max())
            moment = largest + math.log(float(np.exp(exponents - largest).sum()))
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
    """Returns the number of cells below each atom of each component of a mixture.

    Splitting losses between the ends of a cell adds ``p w^2 / 6`` to the variance of a
    loss, for a cell of width w and mass p under the tilt.  For a given number of cells
    the sum is least if ``p w^2`` is the same in all.

    Args:
      found: The sum.
      cost: Known properties of the sum.
      fineness: Largest relative addition to delta.
      parts: Quadrature of each component, with increasing losses.
    """
    low, high = found.ends
    log_moment = found.loss.tilted(found.order)[1]
    # No cell is wider than the splitting of a single loss allows.
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
    added = max(found.num_steps * cost.curvature * total, 1e-300)
    quantum = math.sqrt(12 * fineness / added)
    counts = [one / quantum + two for one, two in zip(shares, steady, strict=True)]
    excess = max(1.0, max(float(count[-1]) for count in counts) / _MOST_CELLS)
    return [count / excess for count in counts]


def found_cost(total: inversion.LaplaceSum, epsilon: float) -> Cost:
    """Returns the cost of a computed sum at ``epsilon``.

    Args:
      total: The sum.
      epsilon: At least 0.
    """
    mean = max(total.mean(epsilon), total.error, total.infinite_share(epsilon))
    return Cost(max(total.density(epsilon), 0.0) / mean, min(math.log(mean), 0.0))
