"""A proven upper bound for shuffled batches: other steps hide the example's step.

A run draws K uniformly random orders of all n examples.  Each is cut into the batches
of T steps, whose sizes are fixed, and is used in V epochs; epochs of different orders
may alternate.  Example x has norm at most 1; its ghost, in the same slot, is zero.
Every step adds Gaussian noise of standard deviation s.  Gradients may depend on
everything released before.

**Theorem.**  Let L < T batches have b + 1 examples, the others b.  Let ``s' = s /
sqrt(V)``, H_h the delta at epsilon h of a Gaussian mechanism with noise s',
``D(p) = p H_h`` for ``p = e^-h``, and R_m the pair of random allocation
(`random_allocation`) with noise s': one of m steps, uniformly random, is shifted by 1,
against none.  Let ``0 <= h``, and

    L = 0:  p = e^-h,            m - 1 ~ Bin(T-1, p),
            beta = (T - 1) D(p);
    L > 0:  p_l = e^-h, p_s = b / (b+1) p_l,  m - 1 ~ Bin(T-L, p_s) + Bin(L-1, p_l),
            beta = (T - L - 1) D(p_s) + L D(p_l).

Then in both directions delta(epsilon) is at most delta of the K-fold composition of the
pair "draw m publicly, then R_m", plus ``K (1 + e^epsilon) beta``.  For one order this
is ``sum over m of Pr[m] delta_{R_m}(epsilon) + (1 + e^epsilon) beta``.

**Proof.**  Steps 1 to 3 are about one order.
  1. *The order.*  Let t* be the batch of x.  Draw disjoint sets F_t of other examples
     that fill all but one slot of each batch, independently of t*.  A uniformly random
     bijection assigns the T - 1 remaining examples to the batches other than t*.  This
     is the law of a uniformly random order.  (For b = 0, omit the empty batches: their
     steps release noise alone.)
  2. *Clones.*  At a visit of batch t != t* the output is N(F_t + y, s^2), where F_t and
     y, of norm at most 1, depend on the past.  All V visits can be answered from one
     number G_t ~ N(sqrt(V)/s, 1), drawn at the start: extend it to a Brownian motion W
     with drift 1 and end point ``G_t sqrt(V)/s`` at time V/s^2.  A visit takes the
     increment of W over the next ``|y|^2 / s^2`` of time, which given the past is
     normal with that mean and variance; times ``s^2 / |y|`` it is the part of the
     output minus F_t along y, and independent noise is the rest (all, if y = 0).  There
     is time enough, as the V times add up to V/s^2 at most.  Given its end point, the
     law of W does not depend on the drift.  So the same procedure, from G_t ~ N(0, 1),
     answers every visit by N(F_t, s^2), whatever y.
     Let C be the minimum of the density of N(sqrt(V)/s, 1) and of p times that of
     N(0, 1).  C has mass p - D(p).  So N(sqrt(V)/s, 1) is within total variation D(p)
     of a coin: N(0, 1) with probability p, and otherwise the normalised rest.  The
     batches with N(0, 1) are the clones.  Replacing all G_t by coins changes the output
     under x, and under the ghost, by at most the sum of D in total variation.  D grows
     with p, so beta bounds the sum, whichever size t* has; and
     ``P(A) - e^epsilon Q(A)`` changes by at most (1 + e^epsilon) beta for any event A.
  3. *What is revealed.*  The set S of t* and the clones, all F_t, and y of every batch
     outside S.  Given t*, the coins are independent of all else, and the y outside S
     are a uniformly random injection, whichever batch of S is t*.  Given S, t* has in S
     probabilities proportional to (size of t) / (probability of t's coin): all of
     ``Pr[t*] Pr[S given t*]`` that depends on t*.  The quotients are equal.  So t* is
     uniform in S given all that is revealed, and the batches outside S have the same
     law, given the past, under x and under the ghost.
  4. *What is left.*  Under the ghost, every visit of S is N(F_t, s^2).  Under x, the
     visits of t* are N(F_t + x, s^2), where x may depend on the past.  The likelihood
     ratio of the run is the product over orders of ``(sum over t in S of M_t) / |S|``,
     where M_t is the product over the visits of t of a factor that, given the past, is
     log-normal with mean 1; a larger norm of x spreads it.  Both deltas are
     expectations under the ghost of convex functions of this ratio, which is linear in
     each M_t.  From the last step of the run to the first, each factor is replaced by
     an independent one of norm 1: each replacement can only increase the expectation
     of a convex function.  What results are independent R_|S|, since V factors of
     noise s are one of noise s'.
  5. *The number of steps.*  If t* is one of the larger batches, |S| is m.  If it is one
     of the smaller, a coin of p_s has become one of p_l: |S| is stochastically larger.
     More clones are never worse: the mean of m + 1 ratios is the mean of its m + 1
     means of m, a contraction.
  6. *Sum.*  What is revealed has the same law under x and under the ghost, and is drawn
     independently for each order, so by joint convexity delta is at most its mean.  The
     total variations of the K orders add up.

Any h gives a valid bound.  By step 5, m may be rounded down.  It is ``m = 1 +
X + Y`` for independent binomial X and Y, of which only the distribution function
matters, an incomplete beta function: no array has the length of the number of steps.

Formal guarantees:
  - Every number is rounded to the private side: R_m is bounded from above, m is rounded
    down (the law that `rounded_down` returns is stochastically smaller), m below the
    least computed value counts as infinite loss, D is rounded up.
  - any number of steps: the cost grows with its logarithm.
  - *Not* covered: relations under which the number of slots differs.

References:
  The theorem is ours.  The idea of clones: Feldman, McMillan and Talwar (2021),
  arXiv:2012.12803.  Random allocation: Feldman and Shenfeld (2025), arXiv:2502.08202.
  Adaptive Gaussian mechanisms from one Gaussian number: as in Gaussian differential
  privacy, Dong, Roth and Su (2022), arXiv:1905.02383, Corollary 3.3.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.claims import random_allocation
from accounting.claims.random_allocation import Direction
from accounting.core.numerics import log_ratio, smallest_noise_in_two, threshold
from accounting.core.pld import dominating_pairs, inversion

#: Number of grid cells of the likelihood ratios, in an answer and in the search for h.
NUM_CELLS, COARSE_CELLS = 400, 150
#: Factor that exceeds the rounding of a product.
_UP = 1 + 1e-12
#: Probability over beta of smaller m, which count as infinite loss.
_LOWER_TAIL = 1e-4
_LARGEST_EPSILON = 600.0
#: Relative distance of two epsilons for which the same h is used.
_SETTLED = 2e-4
_MOST_EXPONENT = 600.0
#: Multiples of the best exponent that ``delta`` tries, too.
_NEARBY = (0.97, 0.98, 0.99, 1.0, 1.005, 1.01, 1.015, 1.02, 1.025, 1.03)
#: The search for h: its first stride, its longest one over h, the least slope of the
#: mixture over the cost's, the last stride over h, and how many h are tried.
_FIRST_STRIDE, _LONGEST, _FLAT, _LAST, _MOST_TRIES = 1.01, 0.1, 1e-3, 2e-3, 8
#: At less noise, the logarithm of a likelihood ratio has a range of hundreds, and all
#: positive ratios together may have less mass than ``random_allocation`` keeps.
_LEAST_NOISE = 0.06


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffles:
    """A run whose epochs follow uniformly random orders.

    Attributes:
      steps: T, number of steps of one epoch, at least 2.
      orders: K, number of independent orders.
      examples: n, number of slots; every batch has n // T of them, or one more.
      noise: s', noise standard deviation over the clip norm, and over the root of the
        number of epochs that follow one order; above 0.
    """

    steps: int
    orders: int
    examples: int
    noise: float

    def rates(self, exponent: float) -> tuple[float, float]:
        """Returns the probabilities that a smaller, and a larger batch is a clone.

        Args:
          exponent: h.
        """
        size, larger = divmod(self.examples, self.steps)
        most = math.exp(-exponent)
        return (most * size / (size + 1), most) if larger else (most, 0.0)

    def clones(self, exponent: float) -> tuple[Coins, Coins]:
        """Returns the coins whose successes are m - 1.

        Args:
          exponent: h.
        """
        larger = self.examples % self.steps
        smaller = self.steps - larger - (larger == 0)
        few, most = self.rates(exponent)
        return Coins(smaller, few), Coins(max(larger - 1, 0), most)

    def replaced(self, exponent: float) -> float:
        """Returns beta at h, rounded up."""
        larger = self.examples % self.steps
        few, most = (self._apart(rate) for rate in self.rates(exponent))
        return ((self.steps - larger - 1) * few + larger * most) * _UP

    def _apart(self, rate: float) -> float:
        """Returns D(p), rounded up."""
        if rate == 0.0:
            return 0.0
        below = max(-math.log(rate) * (1 - 1e-15) - 1e-15, 0.0)
        return rate * dominating_pairs.gaussian_delta(self.noise, below) * _UP

    def cost(self, exponent: float, epsilon: float) -> float:
        """Returns ``K (1 + e^epsilon) beta``, rounded up.

        Args:
          exponent: h.
          epsilon: In [0, 600].
        """
        return self.orders * (1 + math.exp(epsilon)) * self.replaced(exponent) * _UP


def hiding(
    shuffles: Shuffles, exponent: float
) -> tuple[list[tuple[float, int]], float]:
    """Returns pairs (probability, m rounded down), and the probability of smaller m.

    Args:
      shuffles: The run.
      exponent: h.
    """
    tail = _LOWER_TAIL * shuffles.replaced(exponent)
    return rounded_down(*shuffles.clones(exponent), tail)


@functools.lru_cache(maxsize=16)
def directions(
    shuffles: Shuffles, exponent: float, num_cells: int
) -> tuple[Direction, Direction]:
    """Returns the losses of the public mixture of R_m: of removing, and of adding.

    Args:
      shuffles: The run; K does not matter.
      exponent: h.
      num_cells: Number of grid cells of the likelihood ratios.
    """
    parts, lost = hiding(shuffles, exponent)
    losses = [
        random_allocation.directions(shuffles.noise, m, True, num_cells)
        for _, m in parts
    ]
    weights = [weight for weight, _ in parts]
    remove, add = (
        _mix(weights, list(side), lost) for side in zip(*losses, strict=True)
    )
    return remove, add


def _mix(weights: list[float], parts: list[Direction], lost: float) -> Direction:
    pairs = list(zip(weights, parts, strict=True))
    infinite = sum(weight * part.infinite_mass for weight, part in pairs)
    return Direction(
        masses=np.concatenate([weight * part.masses for weight, part in pairs]),
        losses=np.concatenate([part.losses for part in parts]),
        infinite_mass=min(infinite + lost, 1.0),
        relative_error=max(part.relative_error for part in parts),
    )


def applies(shuffles: Shuffles) -> bool:
    """Returns whether the theorem's bound is computed for a run."""
    return shuffles.steps >= 2 and shuffles.noise >= _LEAST_NOISE


def delta_at(
    shuffles: Shuffles, exponent: float, epsilon: float, num_cells: int = NUM_CELLS
) -> float:
    """Returns the theorem's bound on delta, over both directions.

    Args:
      shuffles: The run.
      exponent: h; any gives a valid bound.
      epsilon: At least 0.
      num_cells: Number of grid cells of the likelihood ratios.
    """
    if epsilon > _LARGEST_EPSILON:
        return 1.0
    mixture = _mixture(shuffles, exponent, epsilon, num_cells)
    return min(1.0, mixture + shuffles.cost(exponent, epsilon))


@functools.lru_cache(maxsize=256)
def _mixture(
    shuffles: Shuffles, exponent: float, epsilon: float, num_cells: int
) -> float:
    return max(
        random_allocation.upper_delta(one, shuffles.orders, epsilon)
        for one in directions(shuffles, exponent, num_cells)
    )


def _balanced_exponent(shuffles: Shuffles, epsilon: float) -> float:
    """Returns the h at which the cost and an approximate delta of the mixture meet."""

    def excess(h: float) -> float:
        both = directions(shuffles, h, COARSE_CELLS)
        mixture = max(_rough_delta(one, shuffles.orders, epsilon) for one in both)
        return log_ratio(shuffles.cost(h, epsilon), max(mixture, 1e-300))

    guess = (8 + math.sqrt(2 * epsilon) + 0.5 / shuffles.noise) / shuffles.noise
    return threshold(excess, guess, relative=1e-2, stride=1.1, most=_MOST_EXPONENT)[1]


@functools.lru_cache(maxsize=256)
def best_exponent(
    shuffles: Shuffles, epsilon: float, num_cells: int
) -> tuple[float, float]:
    """Returns an h that nearly minimises delta, and that delta.

    Near it the logarithms of the mixture's delta, which grows with h, and of the cost,
    which falls, are nearly linear.

    Args:
      shuffles: The run.
      epsilon: In [0, 600].
      num_cells: Number of grid cells of the likelihood ratios.
    """
    if num_cells == COARSE_CELLS:
        h = _balanced_exponent(shuffles, epsilon)
    else:
        h, _ = best_exponent(shuffles, epsilon, COARSE_CELLS)
    if not 0 < h < _MOST_EXPONENT:
        return _MOST_EXPONENT, 1.0

    def logs(at: float) -> NDArray[np.float64]:
        both = _mixture(shuffles, at, epsilon, num_cells), shuffles.cost(at, epsilon)
        return np.log(np.maximum(both, 1e-300))

    tried = {h: logs(h)}
    following = h * _FIRST_STRIDE
    while len(tried) < _MOST_TRIES and abs(following - h) > _LAST * h:
        last, h = h, following
        tried[h] = logs(h)
        rise, fall = (tried[h] - tried[last]) / (h - last) * (1.0, -1.0)
        rise, fall = max(rise, _FLAT * fall), max(fall, 1e-9)
        mixture, cost = tried[h]
        shift = (cost - mixture + math.log(fall / rise)) / (rise + fall)
        following = h + float(np.clip(shift, -_LONGEST * h, _LONGEST * h))
    found, (mixture, cost) = min(tried.items(), key=lambda one: np.logaddexp(*one[1]))
    return found, min(1.0, math.exp(mixture) + math.exp(cost))


def _rough_delta(direction: Direction, orders: int, epsilon: float) -> float:
    if orders == 1:
        return direction.delta(epsilon) + direction.infinite_mass
    loss = direction.atoms
    return math.exp(inversion.approximate_log_delta(loss, orders, epsilon))


def delta(shuffles: Shuffles, epsilon: float) -> float:
    """Returns the theorem's bound on delta at the best h found.

    Args:
      shuffles: The run.
      epsilon: At least 0.
    """
    if epsilon > _LARGEST_EPSILON:
        return 1.0
    exponent, _ = best_exponent(shuffles, epsilon, NUM_CELLS)
    # Numbers of clones are integers, so that delta has steps.
    nearby = (min(exponent * factor, _MOST_EXPONENT) for factor in _NEARBY)
    return min(delta_at(shuffles, h, epsilon) for h in nearby)


def epsilon(shuffles: Shuffles, delta: float, most: float) -> float:
    """Returns the theorem's bound on epsilon at the best h found.

    Args:
      shuffles: The run.
      delta: In (0, 1).
      most: A known upper bound; infinity is returned if the theorem's is not smaller.
    """
    if most > _LARGEST_EPSILON:
        return math.inf

    def excess(point: float) -> float:
        return log_ratio(best_exponent(shuffles, point, COARSE_CELLS)[1], delta)

    if excess(most) > 0:
        return math.inf
    rough = threshold(excess, most, relative=2e-3, stride=1.2, most=most)[1]
    found = _epsilon_near(shuffles, delta, rough, most)
    if abs(found - rough) <= _SETTLED * rough:
        return found
    # The best h is the best at that epsilon.
    return min(found, _epsilon_near(shuffles, delta, found, most))


def _epsilon_near(shuffles: Shuffles, delta: float, guess: float, most: float) -> float:
    """Returns a bound on epsilon from the best h at ``guess``."""
    exponent, _ = best_exponent(shuffles, min(guess, most), NUM_CELLS)
    return threshold(
        lambda point: log_ratio(delta_at(shuffles, exponent, point), delta),
        max(guess, 1e-6),
        relative=1e-6,
        stride=1.002,
        most=2 * most + 1,
    )[1]


def noise_multiplier(shuffles: Shuffles, epsilon: float, delta: float) -> float:
    """Returns a noise multiplier at which the theorem proves the target.

    Args:
      shuffles: The run, with the noise at which the search starts.
      epsilon: At least 0.
      delta: In (0, 1).
    """

    def found(noise: float, num_cells: float) -> float:
        run = dataclasses.replace(shuffles, noise=noise)
        if not applies(run):
            return 1.0
        exponent, rough = best_exponent(run, epsilon, int(num_cells))
        if num_cells == COARSE_CELLS:
            return rough
        return delta_at(run, exponent, epsilon)

    if epsilon > _LARGEST_EPSILON:
        return math.inf
    return smallest_noise_in_two(
        found,
        target=delta,
        guess=shuffles.noise,
        coarse=COARSE_CELLS,
        fine=NUM_CELLS,
    )


#: Factor by which distribution functions are rounded up.  The error of the incomplete
#: beta function is below 1e-10 for up to 1e9 trials.
_TAIL_UP = 1 + 1e-9
#: Number of values of m between a power of two and the next; up to twice this number,
#: every m is a value.
_PER_OCTAVE = 32
#: Probability of larger m, which count as the largest value in use.
_UPPER_TAIL = 1e-4
#: Number of values of the smaller of X and Y.
_NUM_NODES = 256
#: Probability of smaller values of it, relative to that of smaller m, which count as 0.
_NODE_TAIL = 1e-8


@dataclasses.dataclass(frozen=True)
class Coins:
    """Independent coins.

    Attributes:
      trials: Number of coins.
      probability: Probability of success of each.
    """

    trials: int
    probability: float

    @property
    def mean(self) -> float:
        """The expected number of successes."""
        return self.trials * self.probability

    def at_most(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``Pr[successes <= point]``, rounded up.

        Args:
          points: Whole numbers, of any sign; shape (n,).
        """
        inside = np.clip(points, 0.0, max(self.trials - 1.0, 0.0))
        found = special.betaincc(
            inside + 1, max(self.trials, 1) - inside, self.probability
        )
        found = np.where(points >= self.trials, 1.0, np.minimum(found * _TAIL_UP, 1.0))
        return np.where(points < 0, 0.0, found)

    def nodes(self, tail: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns values and probabilities of a stochastically smaller number.

        Args:
          tail: Probability, at most, of what is rounded down to 0.
        """
        deviation = math.sqrt(self.mean)
        # Chernoff: Pr[X <= mean - d] <= e^(-d^2 / (2 mean)).
        reach = math.sqrt(-2 * math.log(tail)) * deviation
        low = max(0, math.floor(self.mean - reach))
        high = min(self.trials, math.ceil(self.mean + 5 * deviation) + 2)
        stride = max(1, -(-(high - low) // _NUM_NODES))
        values: NDArray[np.float64] = np.arange(float(low), high + 1.0, stride)
        values[0] = 0.0
        starts = np.append(self.at_most(values - 1), 1.0)
        return values, np.diff(np.maximum.accumulate(starts))


def grid(steps: int) -> NDArray[np.int64]:
    """Returns the values to which m is rounded down, increasing.

    Args:
      steps: Largest m.
    """
    found = list(range(1, min(steps, 2 * _PER_OCTAVE) + 1))
    stride = 2
    while found[-1] + stride <= steps:
        octave = range(found[-1] + stride, min(2 * found[-1], steps) + 1, stride)
        found += octave
        stride *= 2
    return np.array(found)


def rounded_down(
    one: Coins, other: Coins, tail: float
) -> tuple[list[tuple[float, int]], float]:
    """Returns pairs (probability, m), and the probability of smaller m.

    Args:
      one: Coins whose successes are X.
      other: Coins whose successes are Y.
      tail: Probability, at most, of smaller m.
    """
    few, many = sorted((one, other), key=lambda coins: coins.mean)
    values, weights = few.nodes(max(_NODE_TAIL * tail, 1e-300))

    @functools.cache
    def less(m: int) -> float:
        found = float(weights @ many.at_most(m - 2 - values))
        return min(found * _TAIL_UP, 1.0)

    points = grid(one.trials + other.trials + 1).tolist()
    first = max(bisect.bisect_right(points, tail, key=less) - 1, 0)
    end = max(bisect.bisect_left(points, 1 - _UPPER_TAIL, key=less), first + 1)
    used = points[first:end]
    starts = np.maximum.accumulate([less(m) for m in used])
    shares = np.diff(np.append(starts, 1.0))
    return list(zip(shares.tolist(), used, strict=True)), float(starts[0])
