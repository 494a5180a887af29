"""Lower bounds on epsilon from the error rates of a membership test.

The test says "real" if a score of the mechanism's output exceeds a threshold, and
"ghost" otherwise.  If the mechanism is (epsilon, delta)-private, its error rates obey

    1 - FNR <= e^epsilon FPR + delta,       1 - FPR <= e^epsilon FNR + delta,

so that small error rates prove a large epsilon.  The Clopper-Pearson interval over
independent trials bounds the rates from above.  The threshold is chosen on one half of
the trials, and the other half is counted.

Formal guarantees, for independent trials, whatever the mechanism and the score are:
  - coverage of a rate: ``upper_rate`` is below the true rate with probability at most
    ``error``.
  - coverage of epsilon: with rates that hold jointly with probability ``1 - error``,
    ``epsilon_bound`` exceeds the true epsilon with probability at most ``error``.
  - ``ClaimedProfile.excess`` is above 0 only for rates that contradict one of its
    claims (epsilon_j, delta_j).

References:
  Clopper and Pearson (1934); Jagielski, Ullman and Oprea (2020), arXiv:2006.07709.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

#: Ranks, from each end, whose scores are tried as thresholds.  They are few, and none
#: is exceeded by only a handful of scores: the best of many thresholds is often luck.
_NUM_RANKS = 20
_LEAST_RANK = 5

#: (false positive rates, false negative rates) -> what a threshold maximises.
Gain = Callable[[Any, Any], Any]


def upper_rate(successes: Any, trials: int, error: float) -> Any:
    """Returns the Clopper-Pearson upper bound on a probability.

    Args:
      successes: Number of successes; a number or an array.
      trials: Number of independent trials.
      error: Probability with which the bound may be too low.

    Example:
      >>> bool(abs(upper_rate(0, 100, 0.05) - (1 - 0.05**0.01)) < 1e-12)
      True
    """
    count = np.asarray(successes, np.float64)
    # The quantile of Beta(count + 1, trials - count), which for no failures is 1.
    rest = np.maximum(trials - count, 1)
    quantile = special.betaincinv(count + 1, rest, 1 - error)
    bound = np.where(count >= trials, 1.0, quantile)
    return bound if bound.ndim else float(bound)


def lower_rate(successes: Any, trials: int, error: float) -> Any:
    """Returns the Clopper-Pearson lower bound on a probability.

    Args:
      successes: Number of successes; a number or an array.
      trials: Number of independent trials.
      error: Probability with which the bound may be too high.
    """
    return 1 - upper_rate(trials - np.asarray(successes), trials, error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """Error counts of a test.

    Attributes:
      false_positives: Number of trials without the example that were called "real".
      ghosts: Number of trials without the example.
      false_negatives: Number of trials with the example that were called "ghost".
      reals: Number of trials with the example.
    """

    false_positives: int
    ghosts: int
    false_negatives: int
    reals: int

    def upper(self, error: float) -> tuple[float, float]:
        """Returns upper bounds on FPR and FNR; ``error`` is their joint error."""
        return (
            upper_rate(self.false_positives, self.ghosts, error / 2),
            upper_rate(self.false_negatives, self.reals, error / 2),
        )


def count_errors(
    real: NDArray[np.float64], ghost: NDArray[np.float64], threshold: float
) -> Errors:
    """Returns the errors of the test "real if the score is above the threshold".

    Args:
      real: Scores of trials with the example, shape (trials,).
      ghost: Scores of trials without it, shape (trials,).
      threshold: The threshold, in the unit of the scores.
    """
    return Errors(
        false_positives=int(np.sum(ghost > threshold)),
        ghosts=len(ghost),
        false_negatives=int(np.sum(real <= threshold)),
        reals=len(real),
    )


def candidates(
    real: NDArray[np.float64], ghost: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns candidate thresholds: scores at ranks of both kinds, denser at the ends.

    Args:
      real: Scores of trials with the example, shape (trials,).
      ghost: Scores of trials without it, shape (trials,).
    """

    def ranks(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        least = min(_LEAST_RANK, len(scores))
        near = np.geomspace(least, len(scores), _NUM_RANKS).astype(np.int64) - 1
        ordered = np.sort(scores)
        return np.concatenate([ordered[near], ordered[::-1][near]])

    return np.unique(np.concatenate([ranks(real), ranks(ghost)]))


def rates_at(
    real: NDArray[np.float64],
    ghost: NDArray[np.float64],
    thresholds: NDArray[np.float64],
    error: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the bounds of ``Errors.upper`` at each threshold.

    Args:
      real: Scores of trials with the example, shape (trials,).
      ghost: Scores of trials without it, shape (trials,).
      thresholds: Shape (thresholds,).
      error: Probability that a bound of one threshold is too low.

    Returns:
      Bounds on FPR and on FNR, each of shape (thresholds,).
    """
    positives = len(ghost) - np.searchsorted(np.sort(ghost), thresholds, side="right")
    negatives = np.searchsorted(np.sort(real), thresholds, side="right")
    return (
        upper_rate(positives, len(ghost), error / 2),
        upper_rate(negatives, len(real), error / 2),
    )


def choose_threshold(
    real: NDArray[np.float64], ghost: NDArray[np.float64], gain: Gain, error: float
) -> float:
    """Returns the threshold with the largest gain, for use on other trials.

    Args:
      real: Scores of trials with the example, shape (trials,).
      ghost: Scores of trials without it, shape (trials,).
      gain: What the threshold maximises.
      error: Probability that a bound of one threshold is too low.
    """
    thresholds = candidates(real, ghost)
    gains = gain(*rates_at(real, ghost, thresholds, error))
    return float(thresholds[np.argmax(gains)])


def epsilon_bound(fpr: Any, fnr: Any, delta: float) -> Any:
    """Returns the lower bound on epsilon from upper bounds on error rates; >= 0.

    Args:
      fpr: Upper bound on the false positive rate; a number or an array.
      fnr: Upper bound on the false negative rate, of the same shape.
      delta: The delta at which epsilon is bounded.

    Example:
      >>> round(float(epsilon_bound(0.01, 0.5, 0.0)), 4)
      3.912
    """
    fpr, fnr = np.asarray(fpr, np.float64), np.asarray(fnr, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        removed = np.log(np.maximum(1 - fnr - delta, 0.0)) - np.log(fpr)
        added = np.log(np.maximum(1 - fpr - delta, 0.0)) - np.log(fnr)
    # At rates 0 and 1 one direction is -inf or NaN, and gives no bound.
    return np.fmax(np.fmax(removed, added), 0.0)


def gaussian_distance(fpr: Any, fnr: Any) -> Any:
    """Returns the least mu for which a test of N(0, 1) and N(mu, 1) has these rates.

    Any such test has FNR >= Phi(Phi^-1(1 - FPR) - mu).

    Args:
      fpr: False positive rate; a number or an array.
      fnr: False negative rate, of the same shape.
    """
    return -special.ndtri(fpr) - special.ndtri(fnr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimedProfile:
    """A claimed privacy profile: (epsilon_j, delta_j)-privacy for every j.

    Attributes:
      epsilons: Increasing, at least 0.
      deltas: One for each of ``epsilons``.
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]

    def found_deltas(self, fpr: Any, fnr: Any) -> Any:
        """Returns lower bounds on delta at each epsilon, shape (..., epsilons).

        Args:
          fpr: Upper bound on the false positive rate; a number or an array.
          fnr: Upper bound on the false negative rate, of the same shape.
        """
        fpr = np.asarray(fpr, np.float64)[..., None]
        fnr = np.asarray(fnr, np.float64)[..., None]
        factor = np.exp(np.minimum(self.epsilons, 700.0))
        return np.maximum(1 - fnr - factor * fpr, 1 - fpr - factor * fnr)

    def excess(self, fpr: Any, fnr: Any) -> Any:
        """Returns the largest excess of a delta found over the delta claimed.

        Args:
          fpr: Upper bound on the false positive rate; a number or an array.
          fnr: Upper bound on the false negative rate, of the same shape.
        """
        return np.max(self._excesses(fpr, fnr), axis=-1)

    def _excesses(self, fpr: Any, fnr: Any) -> Any:
        return self.found_deltas(fpr, fnr) - np.asarray(self.deltas)

    def worst(self, fpr: float, fnr: float) -> int:
        """Returns the index of the claim with the largest excess; see `excess`.

        Args:
          fpr: Upper bound on the false positive rate.
          fnr: Upper bound on the false negative rate.
        """
        return int(np.argmax(self._excesses(fpr, fnr)))

    def least_fnr(self, fpr: Any) -> Any:
        """Returns the trade-off curve: the least FNR of any test with this FPR."""
        fpr = np.asarray(fpr, np.float64)[..., None]
        factor = np.exp(np.minimum(self.epsilons, 700.0))
        one = 1 - np.asarray(self.deltas) - factor * fpr
        other = (1 - np.asarray(self.deltas) - fpr) / factor
        return np.maximum(np.max(np.maximum(one, other), axis=-1), 0.0)
