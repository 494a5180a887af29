"""Dominating pairs of one step: mixtures of Gaussians, and discrete losses of them.

In units of the clip norm and in the direction of what differs, one step of DP-SGD with
noise multiplier s is dominated by a pair (P, Q) with

    P = sum_j w_j N(a_j, s^2),     Q = sum_j w_j N(-b_j, s^2),     a_j, b_j >= 0.

For one example, j is 1 with the sampling probability q and else 0: ``(a_1, b_1)`` is
``(1, 0)`` when the example is removed, ``(0, 1)`` when it is added (mirrored, so that
the loss increases with x), and ``(1, 1)`` when it is replaced by its opposite.  For a
user, j is a number of rows: see below.  The privacy loss is ``L(x) = ln
dP/dQ(x)``.

*Users.* Each of the k rows of a user is sampled with probability q, so that j of them
are with probability ``w_j = Binom(k, q)(j)``.  The pair is ``P = sum_j w_j N(a_j,
s^2)`` against ``Q = sum_j w_j N(-b_j, s^2)``, for ``a_j, b_j >= 0``.  Without a cap on
the rows of a step, ``a_j = j`` and ``b_j = 0`` if the user is present under P, and the
reverse if absent.  The loss is monotone.

Theorem.  Mixtures ``sum_i w_i N(u_i, s^2 I)`` and ``sum_i w_i N(v_i, s^2 I)`` of
vectors with ``|u_i| <= a_i`` and ``|v_i| <= b_i`` have no larger hockey-stick
divergences than the pair with the same weights.  Those of the pair rise with each a_i
and b_i.  If a_j and b_j rise with j, they also rise if w is replaced by stochastically
larger numbers.

Proof.  In densities relative to N(0, s^2 I), the components are exponential martingales
``X_i = e^(G_i - Var G_i / 2)`` and ``Y_i = e^(H_i - Var H_i / 2)`` of jointly Gaussian
G_i and H_i, whose covariances are the inner products of the means over s^2.  The
divergence at ``e^eps = c`` is ``E g(X, Y)`` for ``g = (sum_i w_i X_i - c sum_i w_i
Y_i)+``, a convex function of a linear one: its second derivatives are at least 0 for
two X or two Y, and at most 0 for an X with a Y.  Along a line between two covariance
matrices, ``E g`` changes by ``E[sum Z_i Z_j g_ij dC_ij] / 2`` over all components Z:
it rises with a covariance of two X or of two Y, variances among them, and falls with
that of an X and a Y.  By Cauchy and Schwarz these are at most ``a_i a_j`` and
``b_i b_j``, and at least ``-a_i b_j`` (over s^2): the covariances of the pair.  Larger
a_i or b_i raise the first two and lower the last.  For the last claim, couple the
smaller number i with the larger one j, and index components by both: the same weights,
and larger means.

*Discrete losses* (`Atoms`) dominate the exact ones.  A loss L between two grid points,
l and l', is split between them so that the probabilities under P *and* under Q are
preserved ("connect the dots").  The likelihood ratio becomes a mean-preserving spread
of itself, so the hockey-stick divergence can only grow, at every epsilon and after any
composition: every result is pessimistic.  The error is of second order in ``l' - l``;
rounding losses up costs a first-order error in each step.

*The Gaussian mechanism in closed form*: exact, and an upper bound for every sampler.
If one example is used in each of T steps with noise multiplier ``s``, the run is
exactly one Gaussian mechanism with noise multiplier ``s / sqrt(T)``.  Subsampling the
example is post-processing of both members of the pair (keep the output with probability
q, else draw it from the ghost's distribution), so this is an upper bound for any
sampler that uses an example at most T times.

Rounding: the relative error of a result is at most ``_margin``, which is added to an
upper bound and subtracted from a lower one.

References:
  Balle and Wang (2018), arXiv:1805.06530, Theorem 8, for the closed form.
  Abadi et al. (2016), arXiv:1607.00133; Zhu, Dong and Wang (2022), arXiv:2106.08567,
  for dominating pairs and their composition.
  Choquette-Choo et al. (2024), arXiv:2310.15526, and Charles et al. (2024),
  arXiv:2407.07737, for mixtures of Gaussians and user-level sampling of rows.
  Doroshenko, Ghazi, Kamath, Kumar and Manurangsi (2022), arXiv:2207.04380, for discrete
  losses.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from accounting.core.numerics import inner, log_ratio, threshold

#: Quadrature nodes per panel, and largest panel width in noise standard deviations: the
#: quadrature error of a Gaussian density is then below 1e-12 of the panel's mass up to
#: twelve standard deviations from the mean, and below rounding in the bulk.
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_PANEL_WIDTH = 0.05
#: Smaller losses are summed as differences from 0.
_SMALL = 0.4


def _by_mean(weights: tuple[float, ...], means: tuple[int, ...]) -> dict[int, float]:
    """Returns the weight of each mean, if it is above 0."""
    if not any(means):
        return {0: 1.0}
    found: dict[int, float] = {}
    for mean, weight in zip(means, weights, strict=True):
        if weight > 0.0:
            found[mean] = found.get(mean, 0.0) + weight
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """The pair of the module docstring.

    Attributes:
      weights: ``w_0 ... w_k``.
      upper: ``a_0 ... a_k``, at least 0, in clip norms.
      lower: ``b_0 ... b_k``, likewise.
      noise_multiplier: s, above 0.
    """

    weights: tuple[float, ...]
    upper: tuple[int, ...]
    lower: tuple[int, ...]
    noise_multiplier: float

    def loss(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the loss at ``x``, which increases with x."""
        return self._log_ratio(x, self.upper) - self._log_ratio(-x, self.lower)

    def _log_ratio(
        self, x: NDArray[np.float64], means: tuple[int, ...]
    ) -> NDArray[np.float64]:
        """Returns the logarithm of a mixture over N(0, s^2)."""
        if not any(means):
            return np.zeros_like(x)
        found = _by_mean(self.weights, means)
        at = np.array(list(found), dtype=np.float64)
        logs = np.log(np.array(list(found.values())))
        scale = 2 * self.noise_multiplier**2
        exponents = np.multiply.outer(2 * at / scale, x)
        exponents += (logs - at**2 / scale).reshape(-1, *(1,) * x.ndim)
        largest = exponents.max(axis=0)
        exponents -= largest
        total = largest + np.log(np.exp(exponents, out=exponents).sum(axis=0))
        # Small losses keep their digits.
        small = np.abs(total) < _SMALL
        total[small] = self._small_log_ratio(x[small], found)
        return total

    def _small_log_ratio(
        self, x: NDArray[np.float64], found: dict[int, float]
    ) -> NDArray[np.float64]:
        excess = np.zeros_like(x)
        for mean, weight in found.items():
            exponent = (2 * mean * x - mean**2) / (2 * self.noise_multiplier**2)
            large = np.exp(math.log(weight) + np.maximum(exponent, 1.0)) - weight
            small = weight * np.expm1(np.minimum(exponent, 1.0))
            excess += np.where(exponent < 1.0, small, large)
        return np.log1p(excess)

    def upper_density(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the density of P."""
        scale = self.noise_multiplier
        density = np.zeros_like(x)
        for mean, weight in self._upper.items():
            density += weight * np.exp(-(((x - mean) / scale) ** 2) / 2)
        return density / (scale * math.sqrt(2 * math.pi))

    @functools.cached_property
    def _upper(self) -> dict[int, float]:
        """The weight of each mean under P."""
        return _by_mean(self.weights, self.upper)

    def support(self, tail_mass: float) -> tuple[float, float]:
        """Returns an interval outside of which P has mass <= ``tail_mass`` per side."""
        width = -float(special.ndtri(tail_mass)) * self.noise_multiplier
        most = max(mean for mean, weight in self._upper.items() if weight > 1e-300)
        return -width, width + most

    def upper_tails(self, low: float, high: float) -> tuple[float, float]:
        """Returns ``P(x < low)`` and ``P(x > high)``.

        Args:
          low: Lower end, in clip norms.
          high: Upper end, in clip norms.
        """

        def tail(point: float, sign: float) -> float:
            return sum(
                weight
                * float(special.ndtr(sign * (point - mean) / self.noise_multiplier))
                for mean, weight in self._upper.items()
            )

        return tail(low, 1.0), tail(high, -1.0)

    def nodes(
        self, edges: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Returns cell edges, and the masses under P and positions x of their nodes.

        Cells that are too wide for the quadrature are cut.

        Args:
          edges: Increasing points, shape (n,).

        Returns:
          Arrays of shapes (cells + 1,), (cells, nodes) and (cells, nodes).
        """
        edges = np.union1d(edges, self._panels(edges[0], edges[-1]))
        half = np.diff(edges)[:, None] / 2
        x = (edges[:-1, None] + half) + half * _POINTS
        return edges, half * _WEIGHTS * self.upper_density(x), x

    def _panels(self, low: float, high: float) -> NDArray[np.float64]:
        """Returns increasing points from ``low`` to ``high`` for the quadrature."""
        width = _PANEL_WIDTH * self.noise_multiplier
        return np.linspace(low, high, 2 + int((high - low) / width))

    def sketch(self, low: float, high: float) -> tuple[NDArray[np.float64], ...]:
        """Returns positions x of few nodes, and their masses under P: for choices.

        Args:
          low: Lower end, in clip norms.
          high: Upper end, in clip norms.
        """
        ends = self._panels(low, high)
        x = (ends[1:] + ends[:-1]) / 2
        return x, np.diff(ends) * self.upper_density(x)


#: One step: a public mixture of pairs, each with its probability.
Step = list[tuple[float, Pair]]


def remove_pair(sampling_probability: float, noise_multiplier: float) -> Pair:
    """Returns the pair of a Poisson-subsampled Gaussian: example against ghost.

    Args:
      sampling_probability: q, in [0, 1].
      noise_multiplier: s, above 0.
    """
    return _of_one(sampling_probability, noise_multiplier, 1, 0)


def add_pair(sampling_probability: float, noise_multiplier: float) -> Pair:
    """Returns the pair of a Poisson-subsampled Gaussian: ghost against example.

    Args:
      sampling_probability: q, in [0, 1].
      noise_multiplier: s, above 0.
    """
    return _of_one(sampling_probability, noise_multiplier, 0, 1)


def replace_pair(sampling_probability: float, noise_multiplier: float) -> Pair:
    """Returns the pair of a Poisson-subsampled Gaussian: example against opposite.

    Args:
      sampling_probability: q, in [0, 1].
      noise_multiplier: s, above 0.
    """
    return _of_one(sampling_probability, noise_multiplier, 1, 1)


def _of_one(rate: float, noise: float, upper: int, lower: int) -> Pair:
    return Pair(
        weights=(1 - rate, rate),
        upper=(0, upper),
        lower=(0, lower),
        noise_multiplier=noise,
    )


#: Probability of improbable numbers of rows: far below any delta.
_LEAST_TAIL = 1e-40


def weights(num_rows: int, sampling_probability: float) -> tuple[float, ...]:
    """Returns the probabilities of sampling 0 ... k rows.

    Args:
      num_rows: k, at least 1.
      sampling_probability: q, in (0, 1).
    """
    counts = np.arange(num_rows + 1)
    return tuple(map(float, stats.binom.pmf(counts, num_rows, sampling_probability)))


def probable(found: NDArray[np.float64]) -> tuple[float, ...]:
    """Returns stochastically larger weights, most of them 0 if few rows are likely.

    Improbable numbers of rows count as all k: few components are left.

    Args:
      found: Probabilities of 0 ... k rows, shape (k + 1,).
    """
    more = np.cumsum(found[::-1])[::-1]  # of as many rows or more
    improbable = more < _LEAST_TAIL
    kept = np.where(improbable, 0.0, found)
    kept[-1] += float(found[improbable].sum())
    return tuple(map(float, kept))


def upper_weights(num_rows: int, sampling_probability: float) -> tuple[float, ...]:
    """Returns `weights` that are stochastically larger; see `probable`.

    Args:
      num_rows: k, at least 1.
      sampling_probability: q, in (0, 1).
    """
    return probable(np.array(weights(num_rows, sampling_probability)))


def steps(
    num_rows: int, sampling_probability: float, noise_multiplier: float
) -> tuple[Step, Step]:
    """Returns one step without a cap in both directions, remove first.

    Args:
      num_rows: k, at least 1.
      sampling_probability: q, in (0, 1).
      noise_multiplier: s, above 0.
    """
    make = functools.partial(
        Pair,
        weights=upper_weights(num_rows, sampling_probability),
        noise_multiplier=noise_multiplier,
    )
    present, absent = tuple(range(num_rows + 1)), (0,) * (num_rows + 1)
    return (
        [(1.0, make(upper=present, lower=absent))],
        [(1.0, make(upper=absent, lower=present))],
    )


#: Mass of P outside the support of a pair, per side: far below any delta.
_OUTSIDE = 1e-290


@dataclasses.dataclass(frozen=True)
class Atoms:
    """A discrete privacy-loss distribution.

    Attributes:
      masses: Probabilities under P, shape (n,).
      losses: Finite losses, shape (n,).
      infinite_mass: Probability of infinite loss under P.
    """

    masses: NDArray[np.float64]
    losses: NDArray[np.float64]
    infinite_mass: float = 0.0

    def clipped(self, low: float, high: float) -> Atoms:
        """Returns a dominating distribution with finite losses in [low, high] only.

        Smaller losses are moved up to ``low``.  This costs nothing if no sum with one
        of them exceeds epsilon.  Larger losses are split between ``high`` and infinity,
        which preserves their masses under P and under Q.  This costs nothing if every
        sum with one of them exceeds epsilon, since delta is then linear in the
        likelihood ratio Q / P.

        Args:
          low: Smallest finite loss.
          high: Largest finite loss.
        """
        excess = np.maximum(self.losses - high, 0.0)
        infinite = self.infinite_mass + inner(self.masses, -np.expm1(-excess))
        losses = np.clip(self.losses, low, high)
        return Atoms(self.masses * np.exp(-excess), losses, infinite)

    def tilted(self, order: float) -> tuple[NDArray[np.float64], float]:
        """Returns the tilted probabilities, and ``ln E[e^(order L)]``.

        Under the tilt, the probability of a loss L is multiplied by ``e^(order L)`` and
        the result is normalised.  Shape (n,), and a number.
        """
        exponents = order * self.losses
        largest, smallest = float(exponents.max()), float(exponents.min())
        if largest < 1.0 and smallest > -1.0 and self.infinite_mass < 0.5:
            # Near order 0 the moment is nearly 1: sum the difference.
            weights = self.masses * np.exp(exponents)
            excess = inner(self.masses, np.expm1(exponents)) - self.infinite_mass
            return weights / float(weights.sum()), math.log1p(excess)
        # The largest product of mass and factor may have neither the largest mass nor
        # the largest factor.
        with np.errstate(under="ignore"):
            exponents += self._log_masses
            largest = float(exponents.max())
            weights = np.exp(exponents - largest)
        total = float(weights.sum())
        return weights / total, largest + math.log(total)

    def cumulants(self, order: float) -> tuple[float, float, float]:
        """Returns ``ln E[e^(order L)]`` and its first two derivatives."""
        if order not in self._cumulants:
            weights, log_moment = self.tilted(order)
            mean = inner(weights, self.losses)
            variance = inner(weights, (self.losses - mean) ** 2)
            self._cumulants[order] = log_moment, mean, variance
        return self._cumulants[order]

    @functools.cached_property  # searches ask for the same orders
    def _cumulants(self) -> dict[float, tuple[float, float, float]]:
        return {}

    @functools.cached_property
    def _log_masses(self) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            return np.log(self.masses)


def support(pair: Pair) -> tuple[float, float]:
    """Returns an interval outside of which P has a negligible mass."""
    return pair.support(_OUTSIDE)


def spread(pair: Pair, edges: NDArray[np.float64], low: float, high: float) -> Atoms:
    """Returns a discrete distribution that dominates the loss of ``pair``.

    Its losses are those at the cell edges, clipped to [low, high].

    Args:
      pair: Dominating pair of one step.
      edges: Increasing points x, shape (n,), from the lower to the upper end of
        `support`; losses between the edges of a cell are split between them.
      low: Smallest finite loss; see `Atoms.clipped`.
      high: Largest finite loss.
    """
    cells, masses, nodes = pair.nodes(edges)
    below, above = pair.upper_tails(edges[0], edges[-1])
    whole = Atoms(masses.ravel(), pair.loss(nodes.ravel()), above).clipped(low, high)
    grid = np.clip(pair.loss(cells), low, high)
    masses = whole.masses.reshape(masses.shape)
    losses = whole.losses.reshape(masses.shape)
    # If a loss is r above the lower edge, the share of the upper edge is
    # (1 - e^-r) / (1 - e^-width).
    width = np.diff(grid)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.expm1(grid[:-1, None] - losses) / np.expm1(-width)
    share = np.where(width > 0, np.clip(share, 0.0, 1.0), 1.0)
    found = np.zeros(len(grid))
    found[:-1] += (masses * (1 - share)).sum(axis=1)
    found[1:] += (masses * share).sum(axis=1)
    # Losses below the support are rounded up to its edge, which is pessimistic.
    found[0] += below
    kept = found > 0
    return Atoms(found[kept], grid[kept], whole.infinite_mass)


def mix(parts: list[tuple[float, Atoms]]) -> Atoms:
    """Returns the mixture of losses with the given weights.

    It dominates a mechanism that draws a public component and then runs it.
    """
    return Atoms(
        np.concatenate([weight * part.masses for weight, part in parts]),
        np.concatenate([part.losses for _, part in parts]),
        sum(weight * part.infinite_mass for weight, part in parts),
    )


# -- the Gaussian mechanism in closed form ---------------------------------------------

#: Least upper bound on delta: a smaller value may have underflowed.
LEAST_DELTA = 1e-300
_UNIT = 2.0**-53


def gaussian_delta(
    noise_multiplier: float, epsilon: float, *, upper: bool = True
) -> float:
    """Returns the hockey-stick divergence at ``epsilon``, rounded up or down.

    ``Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s)`` in both directions.

    Args:
      noise_multiplier: s, at least 0.
      epsilon: At least 0.
      upper: Whether to round up.

    Example:
      >>> round(gaussian_delta(1.0, 1.0), 6)
      0.126937
    """
    if noise_multiplier <= 0.0:
        return 1.0
    if math.isinf(noise_multiplier):
        return 0.0
    half, shift = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    if math.isinf(half) or math.isinf(shift):
        # Overflow: nothing is known.
        return 1.0 if upper else 0.0
    near = half - shift
    if near + 8 * _UNIT * (half + shift) < -40.0:
        return LEAST_DELTA if upper else 0.0
    margin = _margin(near, half, shift)
    if margin > 1.0:
        return 1.0 if upper else 0.0
    value = _value(near, half, shift)
    if upper:
        return min(1.0, max(value * math.exp(margin), LEAST_DELTA))
    return value * math.exp(-margin) if value > LEAST_DELTA else 0.0


def _margin(near: float, half: float, shift: float) -> float:
    """Returns a bound on the absolute error of ``ln(_value)``.

    The noise and both terms of ``near`` are rounded, and the derivative of ln delta
    with respect to ``near`` is at most ``|near| + 3``.
    """
    return 1e-11 + 8 * _UNIT * (half + shift) * (abs(near) + 3)


def _value(near: float, half: float, shift: float) -> float:
    far = -half - shift
    if near > 5.0:
        # The second term, phi(near) Phi(far) / phi(far), is far below the first.
        ratio = special.erfcx(-far / math.sqrt(2)) / 2
        return float(special.ndtr(near)) - math.exp(-(near**2) / 2) * float(ratio)
    # Both terms have the factor phi(near), since e^eps phi(far) = phi(near).  Factoring
    # it out preserves the relative accuracy if the two terms nearly cancel.
    factor = math.exp(-(near**2) / 2) / 2
    start, width = -near / math.sqrt(2), math.sqrt(2) * half
    if width < 0.5:
        # The difference would cancel: integrate minus the derivative instead.
        nodes, weights = _legendre()
        x = start + width * nodes
        slopes = 2 / math.sqrt(math.pi) - 2 * x * special.erfcx(x)
        return factor * width * float(weights @ slopes)
    return factor * float(special.erfcx(start) - special.erfcx(-far / math.sqrt(2)))


@functools.cache
def _legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    return (nodes + 1) / 2, weights / 2


def gaussian_epsilon(
    noise_multiplier: float, delta: float, *, upper: bool = True
) -> float:
    """Returns the smallest epsilon >= 0 at which `gaussian_delta` is at most ``delta``.

    Rounded up or down; infinite without noise.

    Args:
      noise_multiplier: s, at least 0.
      delta: In (0, 1).
      upper: Whether to round up.
    """
    if noise_multiplier <= 0.0:
        return math.inf
    low, high = threshold(
        lambda epsilon: log_ratio(
            gaussian_delta(noise_multiplier, epsilon, upper=upper), delta
        ),
        1.0,
        relative=0.0,
    )
    return high if upper else low


def gaussian_noise(epsilon: float, delta: float, *, upper: bool = True) -> float:
    """Returns the least noise multiplier with `gaussian_delta` at most ``delta``.

    Rounded up or down.

    Args:
      epsilon: At least 0.
      delta: In (0, 1).
      upper: Whether to round up.
    """
    low, high = threshold(
        lambda noise: log_ratio(gaussian_delta(noise, epsilon, upper=upper), delta),
        1.0,
        relative=0.0,
    )
    return high if upper else low


def normal_masses(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns standard normal probabilities between points, accurate in both tails.

    Args:
      points: Increasing, shape (n,).

    Returns:
      Shape (n - 1,).
    """
    below, above = np.diff(special.ndtr(points)), -np.diff(special.ndtr(-points))
    return np.where(points[1:] < 0, below, above)
