"""Aggregates of the last k iterates of a finished run.

theta_1, ..., theta_k are the kept iterates, oldest first; p_i(x) is the prediction of
theta_i for example x: the probability of label 1, the probabilities of all classes, or
for any other loss the output of the network.  Several outputs are treated separately.

    past EMA   average_1 = theta_1
               average_i = (1 - beta_i) average_{i-1} + beta_i theta_i,
               beta_i    = (1 - d) / (1 - d^i)
    UPA        (theta_1 + ... + theta_k) / k
    OPA        (p_1(x) + ... + p_k(x)) / k
    OMV        the class that most of theta_1, ..., theta_k predict for x; in a tie the
               first class.  Numbers have no vote.

With these beta_i the weight of theta_i is d^(k-i) (1 - d) / (1 - d^k), without the
usual extra weight of the oldest iterate; d = 0 is the last iterate, and d -> 1 is UPA.
The paper leaves beta open.

Formal guarantees:
  - ``ema_weights`` sum to 1 and do not decrease from the oldest to the newest.
  - ``WeightedMean`` forms its sums in double precision, and holds one iterate and the
    sums, however many iterates there are.
  - ``Outputs`` holds a fixed number of values per example and class, however many
    iterates there are; logits of OPA are finite where all logits are.

Public: everything, if the iterates are public and the held-out examples need no
protection.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import log_softmax

from accounting.core.validation import check_float, check_int
from trainer.model.metrics import BINARY, CLASSES


def ema_weights(num_iterates: int, decay: float) -> np.ndarray:
    """Returns the weights of the iterates in the past EMA, shape (num_iterates,).

    Args:
      num_iterates: k, at least 1.
      decay: Decay per iterate, in [0, 1).

    Raises:
      InputError: a value is out of range.

    Example:
      >>> ema_weights(3, decay=0.5)
      array([0.14285714, 0.28571429, 0.57142857])
    """
    check_int("num_iterates", num_iterates, at_least=1)
    check_float("keep_decay", decay, at_least=0, below=1)
    weights = decay ** np.arange(num_iterates - 1.0, -1.0, -1.0)
    return weights / weights.sum()


def uniform_weights(num_iterates: int) -> np.ndarray:
    """Returns the equal weights of the iterates in UPA, shape (num_iterates,)."""
    check_int("num_iterates", num_iterates, at_least=1)
    return np.full(num_iterates, 1 / num_iterates)


class WeightedMean:
    """Accumulates the weighted mean of iterates, oldest first.

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
    """Accumulates the iterates' predictions for the same examples, by ``add``.

    Args:
      task: "binary" and "classes" take logits, "other" any numbers.

    Attributes:
      task: The task.
      num_iterates: Number of iterates added.
      mean: Mean prediction (OPA), shape (examples, ...): the probability of label 1, of
        each class, or the output.
      votes: Number of iterates that predict each class, shape (examples, ..., classes);
        None for "other".
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self.num_iterates = 0
        self.mean: np.ndarray = np.zeros(())
        self.votes: np.ndarray | None = None
        self._squares: np.ndarray = np.zeros(())
        self._log_sums: np.ndarray = np.array(-np.inf)

    def add(self, outputs: np.ndarray) -> None:
        """Adds the network outputs of the next iterate, (examples, ...)."""
        self._dtype = outputs.dtype
        values = outputs.astype(np.float64)
        if self.task not in (BINARY, CLASSES):
            self._add_prediction(values)
            return
        logits = _two_classes(values) if self.task == BINARY else values
        logs = log_softmax(logits, axis=-1)
        self._log_sums = np.logaddexp(self._log_sums, logs)
        chosen = logits.argmax(-1)[..., np.newaxis] == np.arange(logits.shape[-1])
        self.votes = chosen + (0 if self.votes is None else self.votes)
        self._add_prediction(np.exp(logs[..., 1] if self.task == BINARY else logs))

    def _add_prediction(self, prediction: np.ndarray) -> None:
        # Welford's update avoids the cancellation of sums of squares.
        self.num_iterates += 1
        change = prediction - self.mean
        self.mean = self.mean + change / self.num_iterates
        self._squares = self._squares + change * (prediction - self.mean)

    @property
    def outputs(self) -> np.ndarray:
        """The network outputs that correspond to the mean prediction, as in ``add``.

        For classes, the logarithms of mean probabilities; for a binary task, the logit.
        They are finite even if probabilities round to 0 or 1.
        """
        if self.task == BINARY:
            return self._log_sums[..., 1] - self._log_sums[..., 0]
        if self.task == CLASSES:
            logs = self._log_sums - np.log(self.num_iterates)
            return logs.astype(self._dtype)
        return self.mean.astype(self._dtype)

    @property
    def vote_share(self) -> np.ndarray:
        """The share of the votes (OMV): for label 1, or for each class."""
        assert self.votes is not None  # of classes
        votes = self.votes[..., 1] if self.task == BINARY else self.votes
        return votes / self.num_iterates

    @property
    def majority(self) -> np.ndarray:
        """The class with most votes (OMV); in a tie the first."""
        assert self.votes is not None  # of classes
        return self.votes.argmax(-1)

    @property
    def stddev(self) -> np.ndarray:
        """Standard deviation over the iterates, with k - 1 degrees of freedom."""
        check_int("num_iterates", self.num_iterates, at_least=2)
        return np.sqrt(self._squares / (self.num_iterates - 1))


def _two_classes(logits: np.ndarray) -> np.ndarray:
    flat = logits.reshape(-1)
    return np.stack([np.zeros_like(flat), flat], -1)


class OutputsByName(dict[str, Outputs]):
    """Name -> ``Outputs``, for networks with one or several outputs.

    Args:
      task: As in ``Outputs``.
      name: Name for a single output.
    """

    def __init__(self, task: str, name: str) -> None:
        super().__init__()
        self.task, self._name, self._several = task, name, False

    def add(self, outputs: np.ndarray | Mapping[str, np.ndarray]) -> None:
        """Adds the network outputs of the next iterate: an array, or a dict."""
        self._several = isinstance(outputs, Mapping)
        named = outputs if isinstance(outputs, Mapping) else {self._name: outputs}
        for name, values in named.items():
            self.setdefault(name, Outputs(self.task)).add(values)

    @property
    def votes(self) -> list[Outputs]:
        """The outputs with votes: the single output of a task of classes, or none."""
        return [one for one in self.values() if one.votes is not None]

    @property
    def outputs(self) -> Any:
        """The network outputs that correspond to the means: an array, or a dict."""
        found = {name: one.outputs for name, one in self.items()}
        return found if self._several else found[self._name]
