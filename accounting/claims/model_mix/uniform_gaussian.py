"""Moments of the likelihood ratio of a shifted Gaussian plus uniform noise.

With the convolution P = N(0, 1) * U[-width/2, width/2] and its density p,

    A_k(shift, width) = E_{x ~ P} [ (p(x - shift) / p(x))^k ],    k = 2, 3, ...

All lengths are in units of the Gaussian's standard deviation.

Formal guarantees:
  - ``log_excess_moments`` returns an upper bound on ``ln(A_k - 1)``: the difference of
    the last two quadratures and the rounding of the exponents are added.
  - Width 0 has the Gaussian's ``A_k = exp(k (k - 1) shift^2 / 2)``, an upper bound for
    every width.  It is also returned if the shift is too large to be of use, or too
    small for the quadrature.
  - A_k increases with the shift and decreases with the width.

Proof of the last: P is log-concave, so the most powerful test between P and P + shift
is a threshold.  At false positive rate a, its false negative rate is
``F(F^-1(1 - a) - shift)``, which decreases with the shift.  A wider uniform is more
dispersed, and remains so after adding a log-concave variable (Lewis and Thompson 1981):
quantiles of F are further apart, so ``F^-1(1 - a) - shift`` is a higher quantile of F.
A pair with a larger false negative rate at every a is a post-processing of the other
pair (Blackwell), so each of its divergences is smaller, including that of order k.

*The worst gradient* has equal coordinates, which a finite cover proves.  One example
moves the coordinates of a step by shifts s_j.  Their squares add up to at most p S^2,
and each shift is at most S.  With g(s) = ln A_k(s, W), `equal_coordinates_lose_most`
shows that

    sum_j g(s_j)  <=  (1 + SLACK) p g(S)        for every such gradient,

It suffices that ``g(s) / s^2 <= (1 + SLACK) g(S) / S^2`` for all s in (0, S].  (Xiao et
al. assert, without proof, that g is convex in s^2, which would make SLACK unnecessary.)

From S down to some s_0, intervals cover all s.  Since g does not fall with s,

    g(s) / s^2 <= g(high) / low^2        for s in [low, high],

and low is chosen so that the right side is just small enough.  For s <= s_0, with
psi = -ln p and y drawn from P, so that A_k = E[exp((k - 1) (psi(y + s) - psi(y)))]:

  - psi'' is 1 minus the variance of the uniform given y.  P is log-concave, so psi'' is
    in [0, 1].  psi''' is minus the third central moment of the uniform given y, which
    is log-concave too: at most 2 in size (Bubeck and Eldan 2014, Lemma 2).
  - So ``psi(y + s) - psi(y) <= s psi' + s^2 psi'' / 2 + s^3``, of mean
    ``s^2 I / 2 + s^3``, where I = E[psi'^2] = E[psi''], and of size at most
    ``s m`` with ``m = |psi'| + s / 2 + s^2``.
  - As ``e^z <= 1 + z + z^2 e^max(z, 0) / 2``, and ln A_k <= A_k - 1,

        g(s) / s^2 <= (k - 1) (I / 2 + s) + (k - 1)^2 / 2 E[m^2 e^((k - 1) s m)],

    which does not fall with s: it holds for all s <= s_0 if it does at s_0.

  - ``equal_coordinates_lose_most`` is true only if the cover was completed, for every
    order up to ``most_order``, with quadratures on the private side.

References:
  Xiao, Wan and Devadas (2023), arXiv:2210.03843, Corollary 4.1; Lewis and Thompson
  (1981), J. Appl. Probab. 18, Theorem 8, on dispersion; Bubeck and Eldan (2014),
  arXiv:1412.1587.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

#: Standard deviations integrated beyond the last point where an integrand is large.
_REACH = 15.0
#: Points per standard deviation: initial and largest number.
_FIRST_POINTS, _MOST_POINTS = 8, 512
#: Largest shift times order that is integrated; beyond, the loss is too large to be of
#: use.
_FARTHEST = 1000.0
#: The effect of a smaller shift is below the rounding of the two densities.
LEAST_SHIFT = 1e-5
#: Relative difference of two quadratures that ends the refinement.
_TOLERANCE = 1e-9
#: Relative error of an exponent, which is a sum of a few terms.
_ROUNDING = 16 * np.finfo(np.float64).eps
#: The density of a narrower uniform is an integral, of a wider one a difference of
#: tails.
_NARROW = 1.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def log_density(x: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """Returns the logarithm of the density of N(0, 1) * U[-width/2, width/2].

    Args:
      x: Points, of any shape.
      width: Width of the uniform, at least 0.

    Example:
      >>> float(log_density(np.zeros(1), 0.0)[0])  # ln(1 / sqrt(2 pi))
      -0.9189385332046727
    """
    if width <= _NARROW:
        means = _NODES[:, None] * (width / 2)
        logs = special.logsumexp(
            x * means - means**2 / 2, b=_WEIGHTS[:, None] / 2, axis=0
        )
        gaussian = -(x**2) / 2 - 0.5 * math.log(2 * math.pi)
        return np.asarray(gaussian + logs)
    distance = np.abs(x)
    near = special.log_ndtr(width / 2 - distance)
    far = special.log_ndtr(-width / 2 - distance)
    return np.asarray(near + np.log1p(-np.exp(far - near)) - math.log(width))


def log_excess_moments(
    shift: float, width: float, most_order: int
) -> NDArray[np.float64]:
    """Returns ``ln(A_k - 1)`` for k = 2 ... ``most_order``, rounded up.

    Args:
      shift: Shift in standard deviations of the Gaussian, above 0.
      width: Width of the uniform in the same unit, at least 0.
      most_order: Largest order k, at least 2.

    Returns:
      Shape (most_order - 1,).

    Raises:
      ArithmeticError: the quadrature does not converge.
    """
    orders = np.arange(2, most_order + 1)
    if width == 0.0 or not LEAST_SHIFT <= shift <= _FARTHEST / most_order:
        # Less noise, hence an upper bound for every width.
        exponents = orders * (orders - 1) * shift**2 / 2
        return np.asarray(log_expm1(exponents * (1 + _ROUNDING)) + _ROUNDING)
    points = _FIRST_POINTS
    while points <= _MOST_POINTS:
        coarse, fine, rounding = _quadratures(shift, width, orders, points)
        errors = np.abs(np.expm1(coarse - fine))
        if errors.max() <= _TOLERANCE:
            return np.asarray(fine + errors + rounding)
        points *= 2
    raise ArithmeticError(
        f"moments of shift={shift!r}, width={width!r}, order {most_order} do not settle"
    )


def log_expm1(exponents: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns ``ln(e^x - 1)`` for x > 0, without overflow."""
    return np.asarray(exponents + np.log(-np.expm1(-exponents)))


def _quadratures(
    shift: float, width: float, orders: NDArray[np.int64], points: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Returns ln(A_k - 1) from half and from all points, and a rounding error."""
    step = 1.0 / (2 * points)
    coarse, fine, largest = [], [], 0.0
    for x in _pieces(shift, width, int(orders[-1]), step):
        here = log_density(x, width)
        loss = log_density(x - shift, width) - here
        terms = here + _log_excess(loss, orders[:, None])
        coarse.append(special.logsumexp(terms[:, ::2], axis=1) + math.log(2 * step))
        fine.append(special.logsumexp(terms, axis=1) + math.log(step))
        largest = max(largest, float(np.abs(here).max() + np.abs(loss).max()))
    rounding = _ROUNDING * (1 + (orders + 1 / shift) * largest)
    return special.logsumexp(coarse, axis=0), special.logsumexp(fine, axis=0), rounding


def _pieces(
    shift: float, width: float, most_order: int, step: float
) -> list[NDArray[np.float64]]:
    """Returns equidistant points where the integrands are not negligible.

    The likelihood ratio falls at the left edge of the uniform.  Beyond its right edge
    the integrand of order k resembles a Gaussian around k times the shift.  Between the
    edges the density is constant.
    """
    left, right = -width / 2 - _REACH, width / 2 + most_order * shift + _REACH
    middle = (-width / 2 + shift + _REACH, width / 2 - _REACH)
    ends = [(left, right)]
    if middle[0] < middle[1]:
        ends = [(left, middle[0]), (middle[1], right)]
    return [
        np.asarray(a + step * np.arange(math.ceil((b - a) / step) + 1), np.float64)
        for a, b in ends
    ]


def _log_excess(
    loss: NDArray[np.float64], orders: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns ``ln(r^k - 1 - k (r - 1))`` for r = e^loss.

    The argument is at least 0, and its mean under P is A_k - 1, without the
    cancellation of a difference from 1.
    """
    power = orders * loss
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        direct = np.log(np.expm1(power) - orders * np.expm1(loss))
        # ln of (k^2 - k) l^2 / 2! + (k^3 - k) l^3 / 3! + (k^4 - k) l^4 / 4!.
        k = orders.astype(np.float64)
        bend = (k + 1) / 3 + (k**2 + k + 1) * loss / 12
        small = np.log(k * (k - 1) / 2 * (1 + bend * loss)) + 2 * np.log(np.abs(loss))
        rest = k * np.exp(loss - power) + (1 - k) * np.exp(-power)
        large = power + np.log1p(-rest)
    found = np.where(np.abs(power) < 1e-4, small, direct)
    return np.asarray(np.where(power > 30.0, large, found))


#: Relative cost of the cover in the divergence; a smaller one takes longer to prove.
SLACK = 0.01
#: Largest number of intervals; most covers have a few hundred.
_MOST_INTERVALS = 3000
#: Bound on the relative error of quadratures.
_MARGIN = 1e-5
#: Spacing of the points of ``_limit``, and their reach beyond the uniform's edge.
_STEP, _LIMIT_REACH = 1 / 256, 15.0


@functools.lru_cache(maxsize=256)
def equal_coordinates_lose_most(
    most_shift: float, width: float, most_order: int
) -> bool:
    """Returns whether the cover was completed.  Takes about a second.

    Args:
      most_shift: S, in standard deviations of the Gaussian.
      width: W, in the same unit.
      most_order: Largest order k, at least 2.
    """
    if width == 0.0:
        return True  # g(s) / s^2 is constant
    allowed = _slopes(most_shift, 1.0, width, most_order) * (1 + SLACK)
    share = _least_share(most_shift, width, allowed)
    return share is not None and _covers(most_shift, width, allowed, share)


def _slopes(
    most_shift: float, share: float, width: float, most_order: int
) -> NDArray[np.float64]:
    """Returns ``g(s) / s^2`` at ``s^2 = share * most_shift^2``, for orders 2, 3, ..."""
    square = share * most_shift**2
    logs = log_excess_moments(math.sqrt(square), width, most_order)
    return np.asarray(np.logaddexp(0.0, logs) / square)


def _least_share(
    most_shift: float, width: float, allowed: NDArray[np.float64]
) -> float | None:
    """Returns (s_0 / S)^2; None if the limit is not small enough for any s_0."""
    shift = most_shift
    while shift > LEAST_SHIFT:
        if (_limit(shift, width, len(allowed) + 1) <= allowed).all():
            return (shift / most_shift) ** 2
        shift /= 2
    return None


def _limit(shift: float, width: float, most_order: int) -> NDArray[np.float64]:
    """Returns a bound on ``g(s) / s^2`` for s up to ``shift``, for orders 2, 3, ..."""
    inner = min(width / 2, _LIMIT_REACH)
    # One half, by symmetry.  Further inside, psi' is 0 and m is constant.
    steps = np.arange(math.ceil((inner + _LIMIT_REACH) / _STEP) + 1, dtype=np.float64)
    y = width / 2 - inner + _STEP * steps
    density = log_density(y, width)
    gaussian = -((y - width / 2) ** 2) / 2 - 0.5 * math.log(2 * math.pi)
    # psi' = (phi(y - W / 2) - phi(y + W / 2)) / (W p(y))
    score = np.exp(gaussian - math.log(width) - density) * -np.expm1(-width * y)
    masses = 2 * _STEP * np.exp(density)
    masses[0] /= 2
    least = shift / 2 + shift**2
    information = float(masses @ score**2)
    values = []
    for k in range(1, most_order):
        with np.errstate(over="ignore"):
            means = (score + least) ** 2 * np.exp(k * shift * (score + least))
            flat = least**2 * np.exp(k * shift * least)
        second = float(masses @ means) + flat
        values.append(k * (information / 2 + shift) + k**2 / 2 * second)
    return np.array(values) * (1 + _MARGIN)


def _covers(
    most_shift: float, width: float, allowed: NDArray[np.float64], least: float
) -> bool:
    """Returns whether intervals from share 1 to ``least`` stay within ``allowed``."""
    share = 1.0
    for _ in range(_MOST_INTERVALS):
        if share <= least:
            return True
        slopes = _slopes(most_shift, share, width, len(allowed) + 1)
        shrinking = float((slopes * (1 + _MARGIN) / allowed).max())
        if shrinking >= 1.0:
            return False
        share *= shrinking
    return False
