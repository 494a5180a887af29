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

import numpy as np
from numpy.typing import NDArray

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
