"""Delta of a sum of many losses, by the inverse of a Laplace transform.

Let S be the sum of T independent losses under P, ``M(z) = E[e^(z L)]``, and D(x) the
mean of ``(1 - e^(x - S))+``, which is delta at epsilon x.  For r > 0 and a period W,

    sum over integers k of  e^(r k W) D(x + k W)
        = e^(-r x) / W  sum over integers j of  M(z_j)^T e^(-i y_j x) / (z_j (z_j + 1)),

with ``y_j = 2 pi j / W`` and ``z_j = r + i y_j`` (Poisson summation: the Fourier
transform of ``e^(r x) D(x)`` is ``M(z)^T / (z (z + 1))``).  All terms on the left are
at least 0, so that the right side bounds D(x) from above for *any* r and W; well chosen
ones make the others vanish.  It is evaluated relative to the Chernoff bound
``M(r)^T e^(-r x)``, which D never exceeds: a delta of 1e-15 is as accurate as one of
0.1.

*Smoothing.*  The sum over j ends early because an independent normal Z of mean v/2 and
variance v is added to S.  As ``E[e^-Z] = 1`` and delta is a convex function of
``e^-S``, it only grows (Jensen), by v/2 times the density of S at x.

*From below.*  Smoothing adds ``E[h(S - x)]`` with ``h(y) = E[(1 - e^-(y + Z))+] -
(1 - e^-y)+``, the time value of an option: the integral over u up to v of half the
normal density of mean -u/2 and variance u at y.  That is ``e^(-y / 2 - u / 8)`` times
the density n_u of mean 0, and as the integral of ``n_u / 2`` is at most ``v n_v``, h is
at most ``v e^(v / 8)`` times the density of Z at -y.  So what smoothing adds is at most
as many times the density of S + Z at x.  What wraps around is bounded by Chernoff's
bound: `LaplaceSum.lower_delta` takes both off.

*One transform.*  Losses need not lie on a grid.  Each is shared among the ``_ORDER``
points around it of a fine grid by Lagrange's weights, so that one fast Fourier
transform gives ``M(z_j)`` at all j.

Error terms, all added (``e`` below is ``_UNIT``):
  - interpolation: of ``e^(i y L)``, by the remainder ``(y h)^p |prod (f - k)| / p!`` of
    Lagrange's formula, on a grid of spacing h.
  - rounding of the transform: ``e (16 + 4 log2 n)`` times the mass that is transformed
    (all but what falls on the grid point of the most probable loss).
  - both, as an error a of ``phi = M(z) / M(r)``, change its T-th power by at most
    ``T a (|phi| + a)^(T - 1)``.
  - rounding of the power: 8 e times its exponent, and 16 e.
  - the end of the sum over j: the integral of ``e^(-v y^2 / 2) / y^2``.
  - the masses of one step are accurate to 16 e relative to their sum, losses to 2 e;
    composed, this multiplies delta by at most ``1 + T e (32 + 4 r E_r|L|)`` (and 1e-9
    for the quadrature of the rare large losses).
  - infinite loss at any step: ``1 - (1 - m)^T``, added.

References:
  Abate and Whitt (1992), "The Fourier-series method for inverting transforms of
  probability distributions", for Poisson summation; Alghamdi et al. (2022),
  arXiv:2208.09595, for the contour; Zhu, Dong and Wang (2022), arXiv:2106.08567, for
  characteristic functions.  Smoothing that keeps the bound on one side is ours.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from accounting.numerics.root_finding import log_ratio, threshold
from accounting.pld.loss_distribution import Atoms

_UNIT = 2.0**-53
#: Points of the grid that share a loss.
_ORDER = 16
#: Largest ``y h``, which the remainder has to the power of ``_ORDER``.
_LARGEST_ANGLE = 1.0
#: Largest number of j above 0: transforms take up to 7 times as many points.
MOST_TERMS = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contour:
    """Where the transform is evaluated; any gives a valid bound.

    Attributes:
      order: r, above 0.
      period: W.
      variance: v, of the normal that is added to the sum; above 0.
      count: Of the j above 0.
      shift: 1 for delta.  0 for the mean of ``(S - x)+``, of which all is true as well,
        with a normal Z of mean 0.
    """

    order: float
    period: float
    variance: float
    count: int
    shift: float = 1.0

    def smoothed_share(self, last: float) -> float:
        """Returns ``|e^(v z (z + shift) / 2)|`` at ``z = r + i last``."""
        real = self.order * (self.order + self.shift) - last**2
        return math.exp(self.variance * real / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaplaceSum:
    """The transform of S along a contour, with bounds on every error.

    Attributes:
      contour: r, W.
      center: The sum of which ``terms`` have no phase.
      log_scale: ``T ln M(r)``.
      powers: ``M(z_j)^T / M(r)^T`` with Z, at j from 0.
      poles: ``z_j (z_j + shift)``.
      error: Bound on the error of `mean`.
      density_error: Of `density`.
      slack: Factor, at least 1, for the relative errors of one step.
      infinite_mass: Probability of infinite loss at some step.
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

    def _waves(self, epsilon: float) -> NDArray[np.complex128]:
        angle = 2 * math.pi / self.contour.period * (epsilon - self.center)
        # Of k m + l the product of two: far fewer exponentials.
        size = math.isqrt(len(self.powers)) + 1
        near = np.exp(-1j * angle * np.arange(size))
        far = np.exp(-1j * angle * size * np.arange(size))
        return np.multiply.outer(far, near).ravel()[: len(self.powers)]

    def _log_chernoff(self, epsilon: float) -> float:
        return self.log_scale - self.contour.order * epsilon

    def mean(self, epsilon: float) -> float:
        """Returns delta over the Chernoff bound, up to ``error``."""
        return self._real_sum(self.powers / self.poles * self._waves(epsilon))

    def density(self, epsilon: float) -> float:
        """Returns about the density of S at ``epsilon``, over the Chernoff bound."""
        return self._real_sum(self.powers * self._waves(epsilon))

    def _real_sum(self, terms: NDArray[np.complex128]) -> float:
        total = 2 * float(terms.real.sum()) - float(terms[0].real)
        return total / self.contour.period

    def on_lattice(
        self, terms: NDArray[np.complex128], size: int
    ) -> tuple[NDArray[np.float64], float]:
        """Returns a sum over j at ``center + m period / size``, and its rounding.

        Args:
          terms: ``powers / poles`` for `mean`, ``powers`` for `density`.
          size: Of the lattice, above ``2 count``; m is counted modulo it.
        """
        scale = size / self.contour.period
        unit = _UNIT * (16 + 4 * math.log2(size))
        total = 2 * float(np.abs(terms).sum()) / self.contour.period
        return np.fft.irfft(np.conj(terms), size) * scale, unit * total

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta at ``epsilon``."""
        mean = min(max(self.mean(epsilon), 0.0) + self.error, 1.0)
        exponent = self._log_chernoff(epsilon) + math.log(mean)
        return min(1.0, self.slack * math.exp(min(exponent, 1.0)) + self.infinite_mass)

    def lower_delta(self, epsilon: float, wrapped: float) -> float:
        """Returns a lower bound on delta, if the exact loss dominates this one.

        Args:
          epsilon: At least 0.
          wrapped: A bound on what wraps around, as of `wrapped`.
        """
        variance = self.contour.variance
        density = max(self.density(epsilon), 0.0) + self.density_error
        added = variance * math.exp(variance / 8) * density
        mean = self.mean(epsilon) - self.error - added - wrapped
        if mean <= 0.0:
            return 0.0
        exponent = self._log_chernoff(epsilon) + math.log(mean)
        return math.exp(min(exponent, 0.0)) * (2 - self.slack)

    def epsilon(self, delta: float) -> float:
        """Returns an epsilon >= 0 at which the bound on delta is at most ``delta``.

        Infinite if there is none, e.g. if infinite loss alone is more probable.
        """
        if self.infinite_mass >= delta:
            return math.inf
        # By Chernoff's bound, large enough but for errors.
        guess = (self.log_scale - math.log(delta)) / self.contour.order
        return threshold(
            lambda epsilon: log_ratio(self.delta(epsilon), delta),
            max(guess, 1e-300),
            relative=1e-9,
        )[1]


def invert(loss: Atoms, num_steps: int, contour: Contour) -> LaplaceSum:
    """Returns the sum of independent copies of ``loss``.

    Args:
      loss: Of one step.
      num_steps: T.
      contour: Where the transform is evaluated.
    """
    weights, log_moment = loss.tilted(contour.order)
    order = np.argsort(loss.losses)
    middle = int(np.searchsorted(np.cumsum(weights[order]), 0.5))
    center = float(loss.losses[order[min(middle, len(order) - 1)]])
    kept = weights > 1e-30  # the others are less than one rounding together
    z, error = _transform(weights[kept], loss.losses[kept] - center, contour)
    log_size, angle = _log_of_one_plus(z)
    size = np.exp(log_size)
    y = 2 * math.pi / contour.period * np.arange(contour.count + 1)
    line = contour.order + 1j * y
    poles: NDArray[np.complex128] = line * (line + contour.shift)
    with np.errstate(under="ignore"):
        exponents = num_steps * (log_size + 1j * angle) + contour.variance / 2 * poles
        powers = np.exp(exponents)
        damped = np.exp(contour.variance / 2 * poles.real)
        wrong = num_steps * error * (size + error) ** (num_steps - 1) * damped
    wrong += 8 * _UNIT * (2 + np.abs(exponents)) * np.abs(powers)
    total = 2 * float(wrong @ (1 / np.abs(poles))) / contour.period
    rest, density_rest = _rest(contour)
    mean_size = float(weights @ np.abs(loss.losses))
    return LaplaceSum(
        contour=contour,
        center=num_steps * center,
        log_scale=num_steps * log_moment,
        powers=powers,
        poles=poles,
        error=total + rest,
        density_error=2 * float(wrong.sum()) / contour.period + density_rest,
        slack=1 + 1e-9 + num_steps * _UNIT * (32 + 4 * contour.order * mean_size),
        infinite_mass=_ever(loss.infinite_mass, num_steps),
    )


def wrapped(loss: Atoms, num_steps: int, contour: Contour, epsilon: float) -> float:
    """Returns a bound on delta at ``epsilon + k W`` for k other than 0, as it counts.

    Over Chernoff's bound, like all of a sum.  ``E_r[e^(-r X) (1 - e^-X)+]`` is at most
    ``E_r[e^(h X)]`` for any h >= -r, here with X = S - epsilon - k W.

    Args:
      loss: Of one step.
      num_steps: T.
      contour: r, W.
      epsilon: At least 0.
    """
    order, period = contour.order, contour.period
    log_moment, _, variance = loss.cumulants(order)
    scale = 1 / max(math.sqrt(num_steps * variance), 1e-100)

    def share(rate: float) -> float:
        moment = num_steps * (loss.tilted(order + rate)[1] - log_moment)
        exponent = moment - rate * epsilon - abs(rate) * period
        return math.exp(min(exponent, 700.0)) / -math.expm1(-abs(rate) * period)

    rates = (scale * np.geomspace(0.2, 60.0, 25)).tolist()
    above = min(share(rate) for rate in rates)
    return above + min(share(-min(rate, order)) for rate in (*rates, order))


def _rest(contour: Contour) -> tuple[float, float]:
    """Returns bounds on the terms beyond the last: of the mean and of the density."""
    last = 2 * math.pi * contour.count / contour.period
    density = contour.smoothed_share(last) / (math.pi * last * contour.variance)
    return density / last**2, density


def _transform(
    weights: NDArray[np.float64], losses: NDArray[np.float64], contour: Contour
) -> tuple[NDArray[np.complex128], NDArray[np.float64]]:
    """Returns ``E e^(i y_j L) - 1``, and bounds on the errors, at j from 0."""
    size = _fast_length(math.ceil(2 * math.pi * contour.count / _LARGEST_ANGLE))
    spacing = contour.period / size
    grid, remainder = _share(weights, losses / spacing, size)
    grid[0] = 0.0  # the rest of 1, by which it is exact
    mass = float(np.abs(grid).sum())
    z = np.conj(np.fft.rfft(grid)[: contour.count + 1]) - grid.sum()
    angles = 2 * math.pi / size * np.arange(contour.count + 1)
    unit = _UNIT * (16 + 4 * math.log2(size))
    return z, 2 * unit * mass + remainder * angles**_ORDER


def _share(
    weights: NDArray[np.float64], places: NDArray[np.float64], size: int
) -> tuple[NDArray[np.float64], float]:
    """Returns weights on a periodic grid, and the factor of the remainder.

    Args:
      weights: Of points on the line.
      places: Of the points.
      size: Of the grid.
    """
    below = np.floor(places)
    share = places - below
    first = np.mod(below, size).astype(np.int64)
    offsets = np.arange(_ORDER) - (_ORDER // 2 - 1)
    # Products of all differences before, and of all after, each point.
    before = np.ones((_ORDER + 1, len(share)))
    after = np.ones((_ORDER + 1, len(share)))
    for k in range(_ORDER):
        np.multiply(before[k], share - offsets[k], out=before[k + 1])
        back = _ORDER - 1 - k
        np.multiply(after[k], share - offsets[back], out=after[k + 1])
    grid = np.zeros(size)
    for k, offset in enumerate(offsets):
        scale = (-1) ** (_ORDER - 1 - k) * (
            math.factorial(k) * math.factorial(_ORDER - 1 - k)
        )
        part = weights * (before[k] * after[_ORDER - 1 - k] / scale)
        grid += np.bincount((first + offset) % size, part, size)
    remainder = float(weights @ np.abs(before[_ORDER]))
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
    """Returns the least ``m 2^k >= size`` with m in 4..7, which transforms fast."""
    shift = max(0, size.bit_length() - 3)
    return max(-(-size >> shift) << shift, 64)


def _ever(probability: float, num_steps: int) -> float:
    """Returns the probability of an event of one step in any of them."""
    if probability >= 1.0:
        return 1.0
    return -math.expm1(num_steps * math.log1p(-probability))
