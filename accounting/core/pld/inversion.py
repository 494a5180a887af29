"""Delta of a sum of many losses, by inversion of a Laplace transform.

Let S be the sum of T independent losses under P, ``M(z) = E[e^(z L)]``, and D(x) the
mean of ``(1 - e^(x - S))+``, which is delta at epsilon x.  For r > 0 and a period W,

    sum over integers k of  e^(r k W) D(x + k W)
        = e^(-r x) / W  sum over integers j of  M(z_j)^T e^(-i y_j x) / (z_j (z_j + 1)),

with ``y_j = 2 pi j / W`` and ``z_j = r + i y_j`` (Poisson summation: the Fourier
transform of ``e^(r x) D(x)`` is ``M(z)^T / (z (z + 1))``).  All terms on the left are
at least 0, so the right side is an upper bound on D(x) for *any* r and W; well-chosen
ones make the terms of k != 0 (*wrapping*) negligible.  The sum is evaluated relative to
the Chernoff bound ``M(r)^T e^(-r x)``, which D never exceeds: a delta of 1e-15 is as
accurate as one of 0.1.

*Smoothing.*  To make the sum over j converge fast, an independent normal Z with mean
v/2 and variance v is added to S.  Since ``E[e^-Z] = 1`` and delta is a convex function
of ``e^-S``, delta only grows (Jensen), by about v/2 times the density of S at x.

*One transform.*  Losses need not lie on a grid.  Lagrange's weights share each loss
among the ``_ORDER`` nearest points of a fine grid, so that one fast Fourier transform
gives ``M(z_j)`` at all j.

Error terms, all added (``e`` below is ``UNIT``):
  - interpolation of ``e^(i y L)``: the remainder ``(y h)^p |prod (f - k)| / p!`` of
    Lagrange's formula, on a grid of spacing h.
  - rounding of the transform: ``e (16 + 4 log2 n)`` times the transformed mass (all but
    the mass on the grid point of the most probable loss).
  - both, as an error a of ``phi = M(z) / M(r)``, change its T-th power by at most
    ``T a (|phi| + a)^(T - 1)``.
  - rounding of the power: 8 e times its exponent, plus 16 e.
  - truncation of the sum over j: the integral of ``e^(-v y^2 / 2) / y^2``.
  - the masses of one step are accurate to 16 e relative to their sum, losses to 2 e;
    after composition, this multiplies delta by at most ``1 + T e (32 + 4 r E_r|L|)``,
    plus 1e-9 for the quadrature of the rare large losses.
  - infinite loss in any step: ``1 - (1 - m)^T``, where m is its probability in one.

*Choices* of what counts as infinite loss, of the contour and of cells use a cheap
quadrature of the exact loss, and the normal approximation of the sum under an
exponential tilt: a tilt of order r multiplies the probability of a loss l by ``e^(r l)
/ M(r)``.  They decide how tight a bound is, never whether it holds.

References:
  Abate and Whitt (1992), "The Fourier-series method for inverting transforms of
  probability distributions", for Poisson summation; Alghamdi et al. (2022),
  arXiv:2208.09595, for the contour; Zhu, Dong and Wang (2022), arXiv:2106.08567, for
  characteristic functions.  Smoothing that keeps the bound on one side is ours.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from accounting.core.numerics import inner, log_ratio, threshold
from accounting.core.pld.dominating_pairs import Atoms

UNIT = 2.0**-53
#: Number of grid points that share a loss.
_ORDER = 16
#: Largest ``y h``; the remainder contains its power of order ``_ORDER``.
_LARGEST_ANGLE = 1.0
#: Largest number of j above 0; a transform has up to 7 times as many points.
MOST_TERMS = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contour:
    """The points z_j and the smoothing; any contour gives a valid bound.

    Attributes:
      order: r, above 0.
      period: W, above 0.
      variance: v, variance of the normal that is added to the sum, above 0.
      count: Number of j above 0.
    """

    order: float
    period: float
    variance: float
    count: int

    def smoothed_share(self, last: float) -> float:
        """Returns ``|e^(v z (z + 1) / 2)|`` at ``z = r + i last``."""
        real = self.order * (self.order + 1) - last**2
        return math.exp(self.variance * real / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaplaceSum:
    """The transform of S along a contour, with bounds on every error.

    Attributes:
      contour: The contour.
      center: Value of the sum at which ``powers`` have phase 0.
      log_scale: ``T ln M(r)``.
      powers: ``M(z_j)^T / M(r)^T``, smoothed, for j >= 0; shape (count + 1,).
      poles: ``z_j (z_j + 1)``, shape (count + 1,).
      error: Bound on the error of `mean`.
      density_error: Bound on the error of `density`.
      slack: Factor, at least 1, that covers the relative errors of one step.
      infinite_mass: Probability of infinite loss in any step.
    """

    contour: Contour
    center: float
    log_scale: float
    powers: NDArray[np.complex128]
    poles: NDArray[np.complex128]
    error: float
    density_error: float
    slack: float
    infinite_mass: float

    @functools.cached_property
    def _means(self) -> NDArray[np.complex128]:
        return _squared(self.powers / self.poles)

    @functools.cached_property
    def _densities(self) -> NDArray[np.complex128]:
        return _squared(self.powers)

    def log_chernoff(self, epsilon: float) -> float:
        """Returns ln of Chernoff's bound on delta at ``epsilon``."""
        return self.log_scale - self.contour.order * epsilon

    def mean(self, epsilon: float) -> float:
        """Returns delta over the Chernoff bound, with an error up to ``error``."""
        return self._real_sum(self._means, epsilon)

    def infinite_share(self, epsilon: float) -> float:
        """Returns the probability of infinite loss over the Chernoff bound; not 0."""
        log_mass = math.log(max(self.infinite_mass, 1e-300))
        return math.exp(min(max(log_mass - self.log_chernoff(epsilon), -690.0), 690.0))

    def density(self, epsilon: float) -> float:
        """Returns the smoothed density of S at ``epsilon`` over the Chernoff bound."""
        return self._real_sum(self._densities, epsilon)

    def _real_sum(self, terms: NDArray[np.complex128], epsilon: float) -> float:
        angle = 2 * math.pi / self.contour.period * (epsilon - self.center)
        # Of place k m + l, the wave is a product of two: far fewer exponentials.
        places = np.arange(len(terms))
        rows = (terms * np.exp(-1j * angle * places)).sum(axis=1)
        rows *= np.exp(-1j * angle * len(terms) * places)
        total = 2 * float(rows.sum().real) - float(terms[0, 0].real)
        return total / self.contour.period

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta at ``epsilon``."""
        mean = min(max(self.mean(epsilon), 0.0) + self.error, 1.0)
        exponent = self.log_chernoff(epsilon) + math.log(mean)
        return min(1.0, self.slack * math.exp(min(exponent, 1.0)) + self.infinite_mass)

    def epsilon(self, delta: float) -> float:
        """Returns an epsilon >= 0 at which the bound on delta is at most ``delta``.

        Infinite if there is none, for example if infinite loss is more probable.
        """
        if self.infinite_mass >= delta:
            return math.inf
        # By Chernoff's bound this is large enough, up to errors.
        guess = (self.log_scale - math.log(delta)) / self.contour.order
        return threshold(
            lambda epsilon: log_ratio(self.delta(epsilon), delta),
            max(guess, 1e-300),
            relative=1e-9,
        )[1]


def _squared(terms: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """Returns terms in rows of a square, with 0s behind them."""
    size = math.isqrt(len(terms)) + 1
    found = np.zeros((size, size), dtype=np.complex128)
    found.ravel()[: len(terms)] = terms
    return found


def invert(loss: Atoms, num_steps: int, contour: Contour) -> LaplaceSum:
    """Returns the sum of T independent copies of ``loss``.

    Args:
      loss: Loss of one step.
      num_steps: T.
      contour: Contour of the inversion.
    """
    weights, log_moment = loss.tilted(contour.order)
    order = np.argsort(loss.losses)
    middle = int(np.searchsorted(np.cumsum(weights[order]), 0.5))
    center = float(loss.losses[order[min(middle, len(order) - 1)]])
    kept = weights > 1e-30  # the others together are below one rounding error
    z, error = _transform(weights[kept], loss.losses[kept] - center, contour)
    log_size, angle = _log_of_one_plus(z)
    size = np.exp(log_size)
    y = 2 * math.pi / contour.period * np.arange(contour.count + 1)
    line = contour.order + 1j * y
    poles: NDArray[np.complex128] = line * (line + 1)
    with np.errstate(under="ignore"):
        exponents = num_steps * (log_size + 1j * angle) + contour.variance / 2 * poles
        powers = np.exp(exponents)
        damped = np.exp(contour.variance / 2 * poles.real)
        wrong = num_steps * error * (size + error) ** (num_steps - 1) * damped
    wrong += 8 * UNIT * (2 + np.abs(exponents)) * np.abs(powers)
    total = 2 * inner(wrong, 1 / np.abs(poles)) / contour.period
    rest, density_rest = _rest(contour)
    mean_size = inner(weights, np.abs(loss.losses))
    return LaplaceSum(
        contour=contour,
        center=num_steps * center,
        log_scale=num_steps * log_moment,
        powers=powers,
        poles=poles,
        error=total + rest,
        density_error=2 * float(wrong.sum()) / contour.period + density_rest,
        slack=1 + 1e-9 + num_steps * UNIT * (32 + 4 * contour.order * mean_size),
        infinite_mass=_ever(loss.infinite_mass, num_steps),
    )


def _rest(contour: Contour) -> tuple[float, float]:
    """Returns bounds on the terms beyond the last j, of mean and of density."""
    last = 2 * math.pi * contour.count / contour.period
    density = contour.smoothed_share(last) / (math.pi * last * contour.variance)
    return density / last**2, density


def _transform(
    weights: NDArray[np.float64], losses: NDArray[np.float64], contour: Contour
) -> tuple[NDArray[np.complex128], NDArray[np.float64]]:
    """Returns ``E e^(i y_j L) - 1`` and bounds on its errors, for j >= 0."""
    size = _fast_length(math.ceil(2 * math.pi * contour.count / _LARGEST_ANGLE))
    spacing = contour.period / size
    grid, remainder = _share(weights, losses / spacing, size)
    grid[0] = 0.0  # its mass is 1 minus the rest, which is exact
    mass = float(np.abs(grid).sum())
    z = np.conj(np.fft.rfft(grid)[: contour.count + 1]) - grid.sum()
    angles = 2 * math.pi / size * np.arange(contour.count + 1)
    unit = UNIT * (16 + 4 * math.log2(size))
    return z, 2 * unit * mass + remainder * angles**_ORDER


def _share(
    weights: NDArray[np.float64], places: NDArray[np.float64], size: int
) -> tuple[NDArray[np.float64], float]:
    """Returns weights on a periodic grid, and the factor of the remainder.

    Args:
      weights: Weights of points on the real line, shape (n,).
      places: Positions of the points in grid spacings, shape (n,).
      size: Number of grid points.
    """
    below = np.floor(places)
    share = places - below
    first = np.mod(below, size).astype(np.int64)
    offsets = np.arange(_ORDER) - (_ORDER // 2 - 1)
    # Products of the differences before each point, and of those after it.
    before = np.ones((_ORDER + 1, len(share)))
    after = np.ones((_ORDER + 1, len(share)))
    for k in range(_ORDER):
        np.multiply(before[k], share - offsets[k], out=before[k + 1])
        back = _ORDER - 1 - k
        np.multiply(after[k], share - offsets[back], out=after[k + 1])
    scales = [
        (-1) ** (_ORDER - 1 - k) * math.factorial(k) * math.factorial(_ORDER - 1 - k)
        for k in range(_ORDER)
    ]
    parts = before[:-1] * after[-2::-1]
    parts *= weights
    parts /= np.array(scales)[:, None]
    # Places of the first offset; the period ends before the last.
    near = first + np.arange(_ORDER)[:, None]
    spread = np.bincount(near.ravel(), parts.ravel(), size + _ORDER)
    grid = np.asarray(spread, np.float64)
    grid[:_ORDER] += grid[size:]
    grid = np.roll(grid[:size], int(offsets[0]))
    remainder = inner(weights, np.abs(before[_ORDER]))
    return grid, remainder / math.factorial(_ORDER)


def _log_of_one_plus(
    z: NDArray[np.complex128],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the real and the imaginary part of ``ln(1 + z)``."""
    square = 2 * z.real + z.real**2 + z.imag**2
    with np.errstate(divide="ignore"):
        log_size = np.where(
            square > -0.5, np.log1p(np.maximum(square, -0.5)) / 2, np.log(np.abs(1 + z))
        )
    return np.maximum(log_size, -700.0), np.arctan2(z.imag, 1 + z.real)


def _fast_length(size: int) -> int:
    """Returns the least ``m 2^k >= size`` with m in 4..7, a fast length for an FFT."""
    shift = max(0, size.bit_length() - 3)
    return max(-(-size >> shift) << shift, 64)


def _ever(probability: float, num_steps: int) -> float:
    """Returns the probability that an event of one step happens in any step."""
    if probability >= 1.0:
        return 1.0
    return -math.expm1(num_steps * math.log1p(-probability))


# -- choices: they decide how tight a bound is, never whether it holds -----------------

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
    count = min(count, MOST_TERMS)
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


def found_cost(total: LaplaceSum, epsilon: float) -> Cost:
    """Returns the cost of a computed sum at ``epsilon``.

    Args:
      total: The sum.
      epsilon: At least 0.
    """
    mean = max(total.mean(epsilon), total.error, total.infinite_share(epsilon))
    return Cost(max(total.density(epsilon), 0.0) / mean, min(math.log(mean), 0.0))
