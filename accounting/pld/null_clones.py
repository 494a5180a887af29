"""A proven upper bound for shuffled batches: other steps hide the example's step.

A uniformly random order of all n examples is cut into the batches of T steps.  Example
x has norm at most 1; its ghost, in the same slot, is zero.  Every step adds Gaussian
noise of standard deviation s.  Gradients may depend on everything released before.

**Theorem.**  Let b be the least batch size, every other b or b + 1, and h >= 0.  Let
``p = e^-h``, ``H_h`` the delta at epsilon h of a Gaussian mechanism with noise s,
``beta = (T - 1) p H_h``, and R_m the pair of random allocation (`random_allocation`):
one of m steps, uniformly random, is shifted by 1, against none.  In one epoch of equal
batches, in both directions,

    delta(epsilon) <= sum over m of Bin(T-1, p)(m-1) delta_{R_m}(epsilon)
                      + (1 + e^epsilon) beta.

For E epochs, each with a fresh order: delta of the E-fold composition of the pair "draw
m publicly, then R_m", plus E times the same cost.  If batch sizes differ by one, let
``a = (b m + 1) / (b + 1)``, M its integer part, ``l = 1 - (M + 1)(1 - M / a)``, and
replace delta_{R_m} by ``l delta_{R_M} + (1 - l) delta_{R_{M+1}}``.

**Proof.**
  1. *The order.*  Let t* be the step of x.  Draw disjoint sets F_t of other examples
     that fill all but one slot of each batch, independently of t*.  A uniformly random
     bijection assigns the T - 1 remaining examples to the steps other than t*.  This is
     the law of a uniformly random order.
  2. *Clones.*  At t != t* the output is N(F_t + y, s^2), |y| <= 1.  Let C be the
     minimum of its density and that of p N(F_t, s^2).  C has mass p - D, where D, the
     hockey-stick divergence of p N(F_t) over N(F_t + y), grows with |y| and is
     p H_h at |y| = 1.  So the step is within total variation p H_h of a step that is
     N(F_t) with probability p, and otherwise the normalised rest, which depends on F_t,
     y and the past.  Replacing all T - 1 steps changes the output under x, and under
     the ghost, by at most beta in total variation, so ``P(S) - e^epsilon Q(S)`` grows
     by at most (1 + e^epsilon) beta.
  3. *What is revealed.*  The set S of t* and the clones (first branch), all F_t, and y
     of every step outside S.  Given t*, the coins are independent of all else, and the
     y outside S are a uniformly random injection, whichever step of S is t*.  So
     |S| - 1 is Bin(T-1, p).  Given all that is revealed, t* has in S probabilities
     proportional to the batch sizes, and the steps outside S have the same law under x
     and under the ghost.
  4. *What is left.*  Under the ghost, every step of S is N(F_t).  Under x, step t* is
     N(F_t + x), where x may depend on the past.  The likelihood ratio is
     ``sum_t w_t M_t``; given the past, M_t is log-normal with mean 1, and a larger norm
     of x spreads it.  From the last step to the first, every M_t is replaced by an
     independent r_t of norm 1.  Each replacement can only increase expectations of
     convex functions, as both deltas are.  With equal weights this is R_|S|.
  5. *Unequal batches.*  No weight in S exceeds 1/a.  Among such weights the
     expectation of a convex function of ``sum_t w_t r_t`` is largest for M weights 1/a
     and one of the rest (majorisation).  This is the mixture, with weights l and 1 - l,
     of M and of M + 1 equal weights.
  6. *Sum.*  What is revealed has the same law under x and under the ghost, so by joint
     convexity delta is at most its mean.  Epochs compose adaptively: given any past, an
     epoch is within beta of one that the public mixture of pairs dominates.

Any h gives a valid bound.  More clones are never worse: the mean of m + 1 ratios is a
contraction of the mean of m.  So m is rounded down to the values for which R_m is
computed.

Formal guarantees:
  - Every number is rounded to the private side: R_m is bounded from above, m is rounded
    down, m below the least computed value counts as infinite loss, p H_h is rounded up.
  - *Not* covered: one order for several epochs (persistent shuffles), and relations
    under which the number of slots differs.

References:
  The theorem is ours.  The idea of clones: Feldman, McMillan and Talwar (2021),
  arXiv:2012.12803.  Random allocation: Feldman and Shenfeld (2025), arXiv:2502.08202.
  Composition of dominating pairs: Zhu, Dong and Wang (2022), arXiv:2106.08567.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from accounting.numerics.calibration import smallest_noise_in_two
from accounting.numerics.root_finding import log_ratio, threshold
from accounting.pld import allocation_loss, gaussian, saddlepoint
from accounting.pld.allocation_loss import Direction

#: Number of grid cells of the likelihood ratios, in an answer and in the search for h.
NUM_CELLS, COARSE_CELLS = 400, 150
#: Plans with more steps get the bound without amplification.
MOST_STEPS = 1 << 17
#: Bound on the relative error of binomial weights, far above the measured error.
_WEIGHT_ERROR = 1e-9
#: Factor that exceeds the rounding of a product.
_UP = 1 + 1e-12
#: Number of values of m between a power of two and the next; up to twice this number,
#: every m is a value.
_PER_OCTAVE = 32
#: Probability of larger m, which count as the largest computed value.
_UPPER_TAIL = 1e-4
#: Probability over beta of smaller m, which count as infinite loss.
_LOWER_TAIL = 1e-4
_LARGEST_EPSILON = 600.0
#: Relative distance of two epsilons for which the same h is used.
_SETTLED = 2e-4
_MOST_EXPONENT = 600.0
#: At less noise, the logarithm of a likelihood ratio has a range of hundreds.
_LEAST_NOISE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffles:
    """A run with a fresh uniformly random order in each epoch.

    Attributes:
      steps: T, number of steps of one epoch, at least 2.
      epochs: E, number of epochs.
      examples: n, number of slots; every batch has n // T of them, or one more.
      noise: s, noise standard deviation over the clip norm, above 0.
    """

    steps: int
    epochs: int
    examples: int
    noise: float

    def replaced(self, exponent: float) -> float:
        """Returns beta at h, rounded up."""
        below = max(exponent * (1 - 1e-15) - 1e-15, 0.0)
        divergence = gaussian.gaussian_delta(self.noise, below)
        return (self.steps - 1) * math.exp(-exponent) * divergence * _UP

    def cost(self, exponent: float, epsilon: float) -> float:
        """Returns ``E (1 + e^epsilon) beta``, rounded up.

        Args:
          exponent: h.
          epsilon: In [0, 600].
        """
        return self.epochs * (1 + math.exp(epsilon)) * self.replaced(exponent) * _UP


def counts(shuffles: Shuffles, exponent: float) -> NDArray[np.float64]:
    """Returns the probabilities of m, at index m: shape (T + 1,), sum 1.

    Args:
      shuffles: The run; T and n matter.
      exponent: h.
    """
    steps = shuffles.steps
    clones = np.arange(1, steps + 1)
    weights = _binomial(steps - 1, math.exp(-exponent))
    size, larger = divmod(shuffles.examples, steps)
    found = np.zeros(steps + 2)
    if not larger:
        found[1:-1] = weights
        return found[:-1]
    # Floating-point numbers hold the integers below exactly up to 2^53.
    whole = (size * clones + 1) // (size + 1)
    rest = size * clones + 1 - whole * (size + 1)
    more = np.clip((whole + 1.0) * rest / (size * clones + 1), 0.0, 1.0)
    np.add.at(found, whole, weights * (1 - more))
    np.add.at(found, whole + 1, weights * more)
    return found[:-1]


def _binomial(trials: int, probability: float) -> NDArray[np.float64]:
    """Returns the probabilities of 0 to ``trials`` successes."""
    k = np.arange(trials + 1.0)
    log_choose = -np.log1p(trials) - special.betaln(1 + trials - k, 1 + k)
    failures = special.xlog1py(trials - k, -probability)
    return np.exp(log_choose + k * math.log(probability) + failures)


def _grid(steps: int) -> NDArray[np.int64]:
    """Returns the values of m for which R_m is computed, increasing."""
    found = list(range(1, min(steps, 2 * _PER_OCTAVE) + 1))
    stride = 2
    while found[-1] + stride <= steps:
        octave = range(found[-1] + stride, min(2 * found[-1], steps) + 1, stride)
        found += octave
        stride *= 2
    return np.array(found)


def hiding(
    shuffles: Shuffles, exponent: float
) -> tuple[list[tuple[float, int]], float]:
    """Returns pairs (probability, m rounded down), and the probability of smaller m.

    Args:
      shuffles: The run; T and n matter.
      exponent: h.
    """
    probabilities = counts(shuffles, exponent)
    grid = _grid(shuffles.steps)
    below = np.cumsum(probabilities)
    lowest = int(np.searchsorted(below, _LOWER_TAIL * shuffles.replaced(exponent)))
    highest = int(np.searchsorted(below, 1 - _UPPER_TAIL))
    first = max(int(np.searchsorted(grid, lowest, side="right")) - 1, 0)
    last = max(int(np.searchsorted(grid, highest, side="right")) - 1, first)
    grid = grid[first : last + 1]
    weights = np.add.reduceat(probabilities, grid)
    lost = float(probabilities[: grid[0]].sum()) * (1 + _WEIGHT_ERROR)
    return list(zip(weights.tolist(), grid.tolist(), strict=True)), lost


@functools.lru_cache(maxsize=16)
def directions(
    shuffles: Shuffles, exponent: float, num_cells: int
) -> tuple[Direction, Direction]:
    """Returns the losses of the public mixture of R_m: of removing, and of adding.

    Args:
      shuffles: The run; T, n and s matter.
      exponent: h.
      num_cells: Number of grid cells of the likelihood ratios.
    """
    parts, lost = hiding(shuffles, exponent)
    losses = [
        allocation_loss.directions(shuffles.noise, m, True, num_cells) for _, m in parts
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
        relative_error=max(part.relative_error for part in parts) + _WEIGHT_ERROR,
    )


def applies(shuffles: Shuffles) -> bool:
    """Returns whether the theorem's bound is computed for a run."""
    return 2 <= shuffles.steps <= MOST_STEPS and shuffles.noise >= _LEAST_NOISE


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
    found = max(
        allocation_loss.upper_delta(one, shuffles.epochs, epsilon)
        for one in directions(shuffles, exponent, num_cells)
    )
    return min(1.0, found + shuffles.cost(exponent, epsilon))


def _parts(
    shuffles: Shuffles, exponent: float, epsilon: float, num_cells: int
) -> tuple[float, float]:
    """Returns an approximate delta of the mixture, and the cost.

    Arguments as for `delta_at`.
    """
    both = directions(shuffles, exponent, num_cells)
    mixture = max(_rough_delta(one, shuffles.epochs, epsilon) for one in both)
    return max(mixture, 1e-300), shuffles.cost(exponent, epsilon)


@functools.lru_cache(maxsize=256)
def _balanced_exponent(shuffles: Shuffles, epsilon: float) -> tuple[float, float]:
    """Returns the h at which the mixture's delta, which grows, exceeds the cost.

    Also the factor that corrects the approximate delta of several epochs near that h.
    """

    def balance(scale: float, guess: float) -> float:
        def excess(h: float) -> float:
            mixture, cost = _parts(shuffles, h, epsilon, COARSE_CELLS)
            return log_ratio(cost, mixture * scale)

        return threshold(excess, guess, relative=1e-2, stride=1.1, most=_MOST_EXPONENT)[
            1
        ]

    guess = (8 + math.sqrt(2 * epsilon) + 0.5 / shuffles.noise) / shuffles.noise
    found = balance(1.0, guess)
    if shuffles.epochs == 1 or not 0 < found <= _MOST_EXPONENT:
        return found, 1.0
    rough, cost = _parts(shuffles, found, epsilon, COARSE_CELLS)
    exact = delta_at(shuffles, found, epsilon, COARSE_CELLS) - cost
    scale = min(max(exact / rough, 1e-6), 1e6)
    return balance(scale, found), scale


@functools.lru_cache(maxsize=256)
def best_exponent(
    shuffles: Shuffles, epsilon: float, num_cells: int
) -> tuple[float, float]:
    """Returns an h that nearly minimises delta, and an approximation of that delta.

    Args:
      shuffles: The run.
      epsilon: In [0, 600].
      num_cells: Number of grid cells of the likelihood ratios.
    """
    middle, scale = _balanced_exponent(shuffles, epsilon)
    if not 0 < middle <= _MOST_EXPONENT:
        return _MOST_EXPONENT, 1.0

    def log_delta(h: float) -> float:
        mixture, cost = _parts(shuffles, h, epsilon, num_cells)
        return math.log(mixture * scale + cost)

    found = optimize.minimize_scalar(
        log_delta,
        bounds=(0.97 * middle, 1.1 * middle),
        method="bounded",
        options={"xatol": 5e-4 * middle},
    )
    return float(found.x), min(math.exp(found.fun), 1.0)


def _rough_delta(direction: Direction, epochs: int, epsilon: float) -> float:
    if epochs == 1:
        return direction.delta(epsilon) + direction.infinite_mass
    loss = direction.atoms
    return math.exp(saddlepoint.approximate_log_delta(loss, epochs, epsilon))


def delta(shuffles: Shuffles, epsilon: float) -> float:
    """Returns the theorem's bound on delta at the best h found.

    Args:
      shuffles: The run.
      epsilon: At least 0.
    """
    if epsilon > _LARGEST_EPSILON:
        return 1.0
    exponent, _ = best_exponent(shuffles, epsilon, NUM_CELLS)
    return delta_at(shuffles, exponent, epsilon)


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
