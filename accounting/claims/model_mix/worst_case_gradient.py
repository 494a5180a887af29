"""Proves, by a finite cover, that a gradient of equal coordinates is the worst case.

One example moves the coordinates of a step by shifts s_j.  Their squares add up to at
most p S^2, and each shift is at most S.  With g(s) = ln A_k(s, W) of
`accounting.claims.model_mix.uniform_gaussian`, this module shows that

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

Formal guarantees:
  - ``equal_coordinates_lose_most`` is true only if the cover was completed, for every
    order up to ``most_order``, with quadratures on the private side.

References:
  Xiao, Wan and Devadas (2023), arXiv:2210.03843, Corollary 4.1; Bubeck and Eldan
  (2014), arXiv:1412.1587.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from accounting.claims.model_mix.uniform_gaussian import (
    LEAST_SHIFT,
    log_density,
    log_excess_moments,
)

#: Relative cost of the cover in the divergence; a smaller one takes longer to prove.
SLACK = 0.01
#: Largest number of intervals; most covers have a few hundred.
_MOST_INTERVALS = 3000
#: Bound on the relative error of quadratures.
_MARGIN = 1e-5
#: Spacing of the points of ``_limit``, and their reach beyond the uniform's edge.
_STEP, _REACH = 1 / 256, 15.0


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
    inner = min(width / 2, _REACH)
    # One half, by symmetry.  Further inside, psi' is 0 and m is constant.
    steps = np.arange(math.ceil((inner + _REACH) / _STEP) + 1, dtype=np.float64)
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
