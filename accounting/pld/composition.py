"""Delta of a sum of losses from below, by one tilted fast Fourier transform.

For upper bounds there is `inversion`.  Let S be the sum of T independent losses under
P, and tilt by an order ``r >= 0``: under P_r a loss l has its probability multiplied by
``e^(r l) / M(r)``, where ``M(r) = E[e^(r L)]``.  Then, with
``g(x) = e^(-r x) (1 - e^-x)`` for x > 0 and 0 elsewhere,

    delta(epsilon) = E[(1 - e^(epsilon - S))+] = C E_r[g(S - epsilon)],
    C = M(r)^T e^(-r epsilon)   (the Chernoff, or Renyi, bound),     0 <= g <= 1.

So an error in the distribution of S under P_r costs delta only that error times C: a
delta of 1e-15 is as accurate as one of 0.1, which an untilted transform cannot give.

Error terms, all taken off (``e`` below is ``_UNIT``):
  - wrap-around: the transform computes S modulo the window.  Sums outside the window
    fall on some point inside, which adds to E_r[g] at most their probability under P_r
    (Chernoff).
  - rounding: each Fourier coefficient f of one step has an absolute error of at most
    ``e (16 + 4 log2 n)`` times the mass that is transformed (all but the most probable
    loss), its T-th power T |f|^(T-1) times that, and by Cauchy and Parseval E_r[g] at
    most the root mean square of it times the 2-norm of g.
  - the masses of one step are accurate to ``16 e`` relative to their sum; composed,
    this multiplies delta by at most ``1 + 32 T e`` (and 1e-9 for the quadrature of
    the rare large losses).
  - infinite loss at any step: ``1 - (1 - m)^T``, added.

References:
  Koskela et al. (2020), arXiv:1906.03049, for the transform; Gopi, Lee and Wutschitz
  (2021), arXiv:2106.02848, for the window; Alghamdi et al. (2022), arXiv:2208.09595,
  for the tilt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

#: Points of one transform: 16 MiB of complex numbers.
MAX_POINTS = 1 << 20
#: Cells of a single step; more are traded for a coarser grid.
_MAX_CELLS = 1 << 19
_UNIT = 2.0**-53
#: Probability under P_r that the window may miss on either side.
_WINDOW_TAIL = 1e-17


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossDistribution:
    """Masses under P of the losses ``(first + k) * spacing``."""

    spacing: float
    first: int
    masses: NDArray[np.float64]

    @property
    def losses(self) -> NDArray[np.float64]:
        """The grid of finite losses."""
        points = self.first + np.arange(len(self.masses))
        return np.asarray(points * self.spacing, np.float64)


def least_spacing(losses: NDArray[np.float64]) -> float:
    """Returns the spacing of the finest grid that is used for these losses.

    It has at most ``_MAX_CELLS`` cells, and its points are counted in 64-bit integers.
    """
    return max(float(np.ptp(losses)) / _MAX_CELLS, float(np.abs(losses).max()) * 1e-10)


class WindowTooLargeError(ValueError):
    """The window needs more points than allowed: use a coarser spacing.

    Attributes:
      excess: Points needed over points allowed, above 1: coarsen by as much.
    """

    def __init__(self, excess: float) -> None:
        super().__init__(f"{excess:g} times too many points")
        self.excess = excess


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiltedSum:
    """Masses of S under P_r at ``low + k * spacing``, with bounds on every error.

    Attributes:
      order: r.
      log_scale: ``T ln M(r)``, of the finite losses.
      low: The smallest sum in the window.
      spacing: Between neighbouring sums.
      masses: Under P_r.
      rounding: Bound on the 2-norm of the rounding errors of the masses.
      slack: Factor, at least 1, for the relative error of the masses of one step.
    """

    order: float
    log_scale: float
    low: float
    spacing: float
    masses: NDArray[np.float64]
    rounding: float
    slack: float

    @property
    def _error(self) -> float:
        # g(x) <= e^(-r x), hence its squared norm is at most 1 + 1/(2 r spacing).
        points = float(len(self.masses))
        if self.order > 0:
            points = min(points, 1 + 1 / (2 * self.order * self.spacing))
        return 2 * _WINDOW_TAIL + self.rounding * math.sqrt(points)

    def _mean(self, epsilon: float) -> float:
        """Returns ``E_r[g(S - epsilon)]`` up to ``_error``."""
        start = max(0.0, math.floor((epsilon - self.low) / self.spacing))
        start = int(min(start, len(self.masses)))
        # Sums further above than this count less than _WINDOW_TAIL in all.
        reach = -math.log(_WINDOW_TAIL) / max(self.order, 1e-9) / self.spacing
        masses = self.masses[start : start + int(min(reach, len(self.masses))) + 2]
        above = self.low + self.spacing * (start + np.arange(len(masses))) - epsilon
        above = np.maximum(above, 0.0)
        return float(np.sum(masses * np.exp(-self.order * above) * -np.expm1(-above)))

    def lower_delta(self, epsilon: float) -> float:
        """Returns a lower bound on delta at ``epsilon``: every error is taken off.

        Valid if the distribution of one step is dominated by the exact one, not if it
        dominates it.
        """
        mean = self._mean(epsilon) - self._error
        if mean <= 0.0:
            return 0.0
        exponent = self.log_scale - self.order * epsilon + math.log(mean)
        return math.exp(min(exponent, 0.0)) * (2 - self.slack)


def compose(
    step: LossDistribution,
    num_steps: int,
    order: float,
    max_points: int = MAX_POINTS,
) -> TiltedSum:
    """Returns the sum of ``num_steps`` independent copies of ``step``, tilted.

    Any ``order >= 0`` gives valid bounds; the Chernoff-optimal one gives tight ones.

    Args:
      step: The loss of one step.
      num_steps: T.
      order: Of the tilt, at least 0.
      max_points: Of the transform.

    Raises:
      WindowTooLargeError: the spacing is too fine for the spread of the sum, which
        would take more than ``max_points`` points.
    """
    losses = step.losses
    tilted, log_moment = _tilt(step, losses, order)
    mean = float(tilted @ losses)
    deviation = math.sqrt(max(float(tilted @ (losses - mean) ** 2), step.spacing**2))
    below, above = _window(tilted, losses - mean, num_steps, deviation)
    needed = int((above + below) / step.spacing) + 3
    if needed > max_points:
        raise WindowTooLargeError(needed / max_points)
    points = _fast_length(needed)
    low = math.floor((num_steps * mean - below) / step.spacing)
    masses, rounding = _power(tilted, num_steps, points, low - num_steps * step.first)
    return TiltedSum(
        order=order,
        log_scale=num_steps * log_moment,
        low=low * step.spacing,
        spacing=step.spacing,
        masses=masses,
        rounding=rounding,
        slack=1 + 1e-9 + 32 * num_steps * _UNIT,
    )


def compose_coarsened(
    step_on: Callable[[float], LossDistribution],
    spacing: float,
    num_steps: int,
    order: float,
    max_points: int = MAX_POINTS,
) -> TiltedSum:
    """Returns `compose` on a grid that is as coarse as it has to be to fit.

    Args:
      step_on: Returns one step on the grid of a spacing.
      spacing: Of the finest grid; the first that is tried.
      num_steps: As for `compose`, like all that follow.
      order: Of the tilt.
      max_points: Of one transform.
    """
    while True:
        try:
            return compose(step_on(spacing), num_steps, order, max_points)
        except WindowTooLargeError as error:
            spacing *= 1.1 * error.excess


def _tilt(
    step: LossDistribution, losses: NDArray[np.float64], order: float
) -> tuple[NDArray[np.float64], float]:
    """Returns the masses under P_r and ``ln M(r)``."""
    with np.errstate(divide="ignore"):
        exponents = np.log(step.masses) + order * losses
    largest = float(exponents.max())
    # Near order 0 the moment is 1 plus little: sum the difference, not the whole.
    tilted = np.exp(exponents - largest)
    total = math.fsum(tilted) if len(tilted) < 4096 else float(tilted.sum())
    return tilted / total, largest + math.log(total)


def _window(
    tilted: NDArray[np.float64],
    centred: NDArray[np.float64],
    num_steps: int,
    deviation: float,
) -> tuple[float, float]:
    """Returns how far below and above its mean S stays, but for ``_WINDOW_TAIL``.

    Chernoff: ``Pr[S - mean >= w] <= exp(T ln E e^(h L) - h w)`` for every h > 0.
    """
    needed = -math.log(_WINDOW_TAIL)
    scale = math.sqrt(2 * needed / num_steps) / deviation
    with np.errstate(divide="ignore"):
        log_tilted = np.log(tilted)
    widths = []
    for sign in (-1.0, 1.0):
        best = math.inf
        for factor in (1.0, 0.5, 0.25, 0.1, 2.0, 0.03):
            rate = factor * scale
            exponents = sign * rate * centred
            # ln E e^(h L) >= 0 for centred L; as log1p of a small sum when it is small.
            if float(exponents.max()) < 1.0:
                moment = math.log1p(max(float(tilted @ np.expm1(exponents)), 0.0))
            else:
                moment = _log_sum(log_tilted + exponents)
            best = min(best, (num_steps * max(moment, 0.0) + needed) / rate)
        widths.append(best)
    return widths[0], widths[1]


def _log_sum(exponents: NDArray[np.float64]) -> float:
    """Returns ``ln(sum(e^exponents))``."""
    largest = float(exponents.max())
    return largest + math.log(float(np.exp(exponents - largest).sum()))


def _fast_length(points: int) -> int:
    """Returns the least ``m 2^k >= points`` with m in 4..7, which transforms fast."""
    shift = max(0, points.bit_length() - 3)
    return max(-(-points >> shift) << shift, 16)


def _power(
    masses: NDArray[np.float64], num_steps: int, points: int, start: int
) -> tuple[NDArray[np.float64], float]:
    """Returns the masses of the sum at ``start .. start + points - 1``, and rounding.

    ``start`` counts from ``num_steps`` times the first grid point.
    """
    # With the most probable loss taken out exactly, only the others are transformed:
    # f = 1 + z, and rounding is relative to their mass, which T multiplies.
    main = int(np.argmax(masses))
    others = masses.copy()
    others[main] = 0.0
    mass = float(others.sum())
    folded = np.pad(others, (0, -len(others) % points)).reshape(-1, points).sum(axis=0)
    z = np.fft.rfft(np.roll(folded, -(main % points))) - mass
    square = 2 * z.real + z.real**2 + z.imag**2
    with np.errstate(divide="ignore", under="ignore"):
        log_absolute = np.where(
            square > -0.5, np.log1p(np.maximum(square, -0.5)) / 2, np.log(np.abs(1 + z))
        )
        powers = np.exp(num_steps * log_absolute)
        amplification = np.exp(2 * (num_steps - 1) * np.clip(log_absolute, -1e300, 0.0))
    powers = powers * np.exp(1j * (num_steps * np.arctan2(z.imag, 1 + z.real)))
    composed = np.fft.irfft(powers, points)
    composed = np.roll(composed, -((start - num_steps * main) % points))
    unit = _UNIT * (16 + 4 * math.log2(points))
    rounding = unit * (1 + num_steps * min(1.0, 2 * mass))
    return composed, rounding * math.sqrt(float(amplification.mean()))
