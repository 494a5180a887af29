"""What to make of the last k iterates of a run when it is finished.

theta_1, ..., theta_k are the kept iterates, oldest first; p_i(x) is the probability of
label 1 that theta_i predicts for example x.

    past EMA   average_1 = theta_1
               average_i = (1 - beta_i) average_{i-1} + beta_i theta_i,
               beta_i    = (1 - d) / (1 - d^i)
    UPA        (theta_1 + ... + theta_k) / k
    OPA        (p_1(x) + ... + p_k(x)) / k
    OMV        the label that most of theta_1, ..., theta_k predict for x

With these beta_i the weight of theta_i is d^(k-i) (1 - d) / (1 - d^k): the oldest
iterate has no more weight than its age gives it, d = 0 is the last iterate, and d -> 1
is UPA.  The paper leaves beta free.

Formal guarantees:
  - ``ema_weights`` sum to 1 and do not fall from the oldest to the newest.
  - ``WeightedMean`` forms its sums in double precision, and holds one iterate and the
    sums, however many iterates there are.
  - ``Outputs`` holds a fixed number of values per example, however many iterates there
    are; the logit of OPA is finite where all logits are.

Public: all of it, where the iterates are and the held-out examples need no protection.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accounting.validation import check_float, check_int


def ema_weights(num_iterates: int, decay: float) -> np.ndarray:
    """Returns the weight of every iterate in the past EMA, oldest first.

    Args:
      num_iterates: k, at least 1.
      decay: Per iterate, in [0, 1).

    Returns:
      Shape (num_iterates,), with sum 1.

    Raises:
      InputError: name, value, bound.

    Example:
      >>> ema_weights(3, decay=0.5)
      array([0.14285714, 0.28571429, 0.57142857])
    """
    check_int("num_iterates", num_iterates, at_least=1)
    check_float("keep_decay", decay, at_least=0, below=1)
    weights = decay ** np.arange(num_iterates - 1.0, -1.0, -1.0)
    return weights / weights.sum()


def uniform_weights(num_iterates: int) -> np.ndarray:
    """Returns the weight of every iterate in UPA: all the same."""
    check_int("num_iterates", num_iterates, at_least=1)
    return np.full(num_iterates, 1 / num_iterates)


class WeightedMean:
    """Adds up iterates, oldest first, each with its weight.

    Example:
      >>> mean = WeightedMean(uniform_weights(2))
      >>> mean.add([np.array([1.0, 2.0])])
      >>> mean.add([np.array([3.0, 2.0])])
      >>> mean.values()
      [array([2., 2.])]
    """

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = iter(weights.tolist())
        self._sums: list[np.ndarray] = []
        self._dtypes: list[np.dtype] = []

    def add(self, iterate: Sequence[np.ndarray]) -> None:
        """Adds the next iterate."""
        weight = next(self._weights)
        if not self._sums:
            self._sums = [np.zeros(array.shape) for array in iterate]
            self._dtypes = [array.dtype for array in iterate]
        for total, array in zip(self._sums, iterate, strict=True):
            total += weight * array.astype(np.float64)

    def values(self) -> list[np.ndarray]:
        """Returns the mean, in the iterates' own precision."""
        return [
            total.astype(dtype)
            for total, dtype in zip(self._sums, self._dtypes, strict=True)
        ]


class Outputs:
    """What the iterates predict for the same examples: ``add`` their logits in turn.

    Attributes:
      num_iterates: How many were added.
      mean: Mean probability of label 1, shape (num_examples,).
      votes: Iterates that predict label 1, shape (num_examples,).
    """

    def __init__(self, num_examples: int) -> None:
        self.num_iterates = 0
        self.mean = np.zeros(num_examples)
        self.votes = np.zeros(num_examples, np.int64)
        self._squares = np.zeros(num_examples)
        self._log_sums = np.full((2, num_examples), -np.inf)

    def add(self, logits: np.ndarray) -> None:
        """Adds the logits of the next iterate, shape (num_examples,)."""
        logits = logits.astype(np.float64)
        logs = np.stack([-np.logaddexp(0, logits), -np.logaddexp(0, -logits)])
        self._log_sums = np.logaddexp(self._log_sums, logs)
        self.votes += logits > 0
        # Welford's update: sums of squares would cancel.
        self.num_iterates += 1
        probability = np.exp(logs[1])
        change = probability - self.mean
        self.mean += change / self.num_iterates
        self._squares += change * (probability - self.mean)

    @property
    def mean_logits(self) -> np.ndarray:
        """The logit of the mean probability (OPA), also where that rounds to 0 or 1."""
        return self._log_sums[1] - self._log_sums[0]

    @property
    def vote_share(self) -> np.ndarray:
        """The share of the iterates that predict label 1: k + 1 values (OMV)."""
        return self.votes / self.num_iterates

    @property
    def majority(self) -> np.ndarray:
        """The label of most iterates (OMV); 0 if as many predict 1."""
        return (2 * self.votes > self.num_iterates).astype(np.int64)

    @property
    def stddev(self) -> np.ndarray:
        """Standard deviation of the probabilities, with k - 1 degrees of freedom."""
        check_int("num_iterates", self.num_iterates, at_least=2)
        return np.sqrt(self._squares / (self.num_iterates - 1))
