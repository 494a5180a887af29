"""Simulates an opponent of shuffled batches: an epsilon that the run has at least.

The opponent knows all examples but one, whose gradients are opposite to the others'.
With w_t the share of the examples in batch t, one order releases, in clip norms and
relative to the other examples,

    P = sum over t of w_t N(2 e_t, s^2 I),     Q = sum over t of w_t N(e_t, s^2 I),

with s the noise over the root of the epochs that follow one order.  The best test of
the opponent has ``delta(epsilon) = E_P[(1 - e^epsilon Q / P)+]``, which is estimated
from samples of ``G = sum of w_t N(a e_t, s^2 I)`` with weights P / G.  The weights are
not bounded; cutting the weighted gain to at most c leaves a smaller mean, to which an
empirical Bernstein bound applies.  A first sample chooses a, c and epsilon, and a
second one tests them.

Formal guarantees:
  - the epsilon returned is below that of the run, except with probability at most
    ``ERROR_PROBABILITY`` over ideal random numbers.
  - equal questions have equal answers: the seed is fixed, and part of the answer.

No privacy claim depends on this module, and it shares no formula with
`accounting.claims.shuffles.shuffle`, whose lower bound looks at the largest step alone.

References:
  Chua et al. (2024), arXiv:2411.04205, for the pair; Maurer and Pontil (2009),
  arXiv:0907.3740, Theorem 4, for the bound.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tests.accounting.cross_check.simulation import ERROR_PROBABILITY, SEED, deviation

#: Normal values drawn for each sample, and at a time.
_NUM_VALUES = 20_000_000
_CHUNK = 1 << 20
_MOST_SAMPLES = 100_000
#: More values of one sample leave too few samples.
MOST_VALUES = 50_000
#: Shares of the chosen epsilon that the second sample tests, largest first.
_SHARES = (1.0, 0.98, 0.95, 0.9, 0.7)
#: Share of the first sample's gains above which they are cut.
_CUT = 2e-3

_Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomOrders:
    """All examples are cut into steps in several uniformly random orders.

    Attributes:
      num_steps: Steps of an epoch.
      num_orders: Independent orders of the run.
      num_examples: Slots of the data set.
      noise: Noise standard deviation of a step over the clip norm, and over the root of
        the number of epochs that follow one order.
    """

    num_steps: int
    num_orders: int
    num_examples: int
    noise: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attained:
    """What the opponent attains.

    Attributes:
      epsilon: The run has more at the delta that was asked for; 0 if nothing is shown.
      num_samples: Samples of the second, deciding draw.
    """

    epsilon: float
    num_samples: int


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Logarithms of P / G and Q / G of a run, shapes (n,)."""

    present: _Floats
    absent: _Floats

    def gains(self, epsilon: float) -> _Floats:
        """Returns ``(P - e^epsilon Q)+ / G``, whose mean is delta."""
        kept = -np.expm1(np.minimum(epsilon + self.absent - self.present, 0.0))
        gains: _Floats = np.exp(np.minimum(self.present, 600.0)) * kept
        return gains

    def at_least(self, epsilon: float, cut: float, error: float) -> float:
        """Returns a lower bound on delta.

        Args:
          epsilon: At least 0.
          cut: Above 0; larger gains count as this one.
          error: Probability, at most, that the bound fails.
        """
        shares = np.minimum(self.gains(epsilon) / cut, 1.0)
        return max(0.0, float(shares.mean()) - deviation(shares, error)) * cut


def attained(orders: RandomOrders, delta: float) -> Attained:
    """Returns the epsilon that the opponent attains at ``delta``.

    Args:
      orders: Steps, orders and noise of a run; the noise is above 0.
      delta: In (0, 1).
    """
    streams = np.random.default_rng(SEED).spawn(2)
    # From the step's own mean to where a loss of 60 is usual.
    shifts = 2.0 + orders.noise * np.array([0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0])
    chosen = (0.0, 2.0, 1.0)
    for shift in shifts:
        first = _draw(streams[0], orders, float(shift), share=1 / len(shifts))
        epsilon, cut = _largest_epsilon(first, delta)
        chosen = max(chosen, (epsilon, float(shift), cut))
    guess, shift, cut = chosen
    second = _draw(streams[1], orders, shift)
    for share in _SHARES:
        error = ERROR_PROBABILITY / len(_SHARES)
        if guess > 0 and second.at_least(share * guess, cut, error) >= delta:
            break
    else:
        share = 0.0
    count = len(second.present)
    return Attained(epsilon=share * guess, num_samples=count)


def _largest_epsilon(first: _Sample, delta: float) -> tuple[float, float]:
    """Returns an epsilon that the sample shows at ``delta``, and its cut."""
    low, high, found = 0.0, 60.0, (0.0, 1.0)
    for _ in range(30):
        middle = (low + high) / 2
        gains = first.gains(middle)
        cut = float(np.quantile(gains, 1 - _CUT))
        if cut > 0 and first.at_least(middle, cut, ERROR_PROBABILITY) >= delta:
            low, found = middle, (middle, cut)
        else:
            high = middle
    return found


def _draw(
    rng: np.random.Generator, orders: RandomOrders, shift: float, share: float = 1.0
) -> _Sample:
    """Returns a sample under G whose own step has the mean ``shift``."""
    steps, noise = orders.num_steps, orders.noise
    sizes = np.full(steps, orders.num_examples // steps)
    sizes[: orders.num_examples % steps] += 1
    log_shares = np.log(sizes / orders.num_examples)
    drawn = share * _NUM_VALUES / (steps * orders.num_orders)
    count = int(np.clip(drawn, 200, _MOST_SAMPLES))
    rows = max(1, _CHUNK // steps)
    present, absent = np.zeros((2, count))
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        for _ in range(orders.num_orders):
            x = noise * rng.standard_normal((stop - start, steps))
            own = rng.choice(steps, size=stop - start, p=np.exp(log_shares))
            x[np.arange(stop - start), own] += shift
            logs = [
                special.logsumexp((a * x - a * a / 2) / noise**2 + log_shares, axis=1)
                for a in (2.0, 1.0, shift)
            ]
            present[start:stop] += logs[0] - logs[2]
            absent[start:stop] += logs[1] - logs[2]
    return _Sample(present, absent)
