"""The kept iterates of a finished run: their averages, metrics, models and intervals.

    RUN/iterates/step-00000120.npz   the trainable weights after 120 steps

An iterate is as public as the model: the guarantee of a private run is for all of its
iterates together.  Optimizer slots and noise are not in it.  ``numpy.load`` reads it;
its arrays, in order, are the ``trainable_weights`` of the exported Keras model.  The
kept steps are known before the run: their number bounds the disk space.  A file is
complete or absent, and is written when its state is committed.

*Averages.*  theta_1, ..., theta_k are the kept iterates, oldest first; p_i(x) is the
prediction of theta_i for example x: the probability of label 1, the probabilities of
all classes, or for any other loss the output of the network.  Several outputs are
treated separately.

    past EMA   average_1 = theta_1
               average_i = (1 - beta_i) average_{i-1} + beta_i theta_i,
               beta_i    = (1 - d) / (1 - d^i)
    UPA        (theta_1 + ... + theta_k) / k
    OPA        (p_1(x) + ... + p_k(x)) / k
    OMV        the class that most of theta_1, ..., theta_k predict for x; in a tie the
               first class.  Numbers have no vote.

With these beta_i the weight of theta_i is d^(k-i) (1 - d) / (1 - d^k), without the
usual extra weight of the oldest iterate; d = 0 is the last iterate, and d -> 1 is UPA.
The paper leaves beta open.  Sums are formed in double precision, of one iterate at a
time: memory does not depend on the number of iterates, and holds a few numbers per
held-out example, output and class.  Logits of OPA are finite where all logits are.

*Intervals* show how predictions vary due to noise:

    pbar = (p_1 + ... + p_k) / k          S^2 = sum (p_i - pbar)^2 / (k - 1)
    interval at level L:  pbar +- t S / sqrt(k),  clipped to [0, 1] for probabilities,

where t is the (1 + L) / 2 quantile of Student's distribution with k - 1 degrees of
freedom.  For independent normal predictions the interval, before clipping, covers their
mean with probability L; iterates are only approximately independent and normal.  The
level holds for each interval alone, not for all classes together.  S^2 approximates the
variance over runs for late and distant kept iterates (section 5 of the paper); it is
smaller if they are close together.

Public: everything, if the held-out examples need no protection.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, sections 3 and 5.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import log_softmax
from scipy.stats import t

from accounting.core.validation import InputError, check_float, check_int
from pipelines.files.storage import write_atomically
from trainer.model.metrics import BINARY, CLASSES, OTHER, Metrics, auc, correct
from trainer.report.run_files import ITERATES_NAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iterates:
    """The kept iterates of one run.

    Attributes:
      run: The folder of the run.
      steps: Numbers of steps after which an iterate is kept, ascending.
    """

    run: pathlib.Path
    steps: tuple[int, ...]

    def path(self, step: int) -> pathlib.Path:
        """Returns where the weights after ``step`` steps are."""
        return self.run / ITERATES_NAME / f"step-{step:08d}.npz"

    def keep(self, step: int, weights: Sequence[np.ndarray]) -> None:
        """Writes an iterate.

        Args:
          step: Number of steps before it.
          weights: The trainable weights, in order.
        """
        path = self.path(step)
        path.parent.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, **{f"weight_{i}": array for i, array in enumerate(weights)})
        write_atomically(path, buffer.getvalue())

    def load(self, step: int) -> list[np.ndarray]:
        """Returns the weights after ``step`` steps; see `read_iterate`."""
        return read_iterate(self.path(step))

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return map(self.load, self.steps)


def read_iterate(path: pathlib.Path) -> list[np.ndarray]:
    """Returns the weights of a kept iterate.

    Raises:
      InputError: the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return [arrays[f"weight_{index}"] for index in range(len(arrays))]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        raise InputError(
            f"Expected {path} to be an iterate that the run kept; it is missing or "
            "damaged. Restore it, or begin a new run in an empty folder."
        ) from None


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


def weighted_mean(
    iterates: Iterable[Sequence[np.ndarray]], weights: np.ndarray
) -> list[np.ndarray]:
    """Returns the weighted mean of iterates, in their own precision.

    Args:
      iterates: At least one, oldest first.
      weights: Weight of each.

    Example:
      >>> weighted_mean([[np.array([1.0, 2.0])], [np.array([3.0, 2.0])]], [0.5, 0.5])
      [array([2., 2.])]
    """
    sums: list[np.ndarray] = []
    for weight, iterate in zip(weights, iterates, strict=True):
        sums = sums or [np.zeros(array.shape) for array in iterate]
        for total, array in zip(sums, iterate, strict=True):
            total += weight * array.astype(np.float64)
    return [
        total.astype(array.dtype) for total, array in zip(sums, iterate, strict=True)
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


#: Suffixes of columns for one of several outputs; used alone for a single output.
STDDEV = "stddev"
_PARTS = (STDDEV, "low", "high")


def student_interval(
    mean: np.ndarray,
    stddev: np.ndarray,
    *,
    num_iterates: int,
    level: float,
    of_probabilities: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and the upper ends of the intervals, each like ``mean``.

    Args:
      mean: Mean prediction over iterates, shape (examples, ...).
      stddev: Standard deviation over iterates, in the shape of ``mean``.
      num_iterates: k, at least 2.
      level: Level of the intervals, in (0, 1).
      of_probabilities: Whether to clip the ends to [0, 1].

    Raises:
      InputError: ``level`` is out of range.

    Example:
      >>> low, high = student_interval(
      ...     np.array([0.5]), np.array([0.02]), num_iterates=4, level=0.95)
      >>> round(float(high[0] - 0.5), 6)  # 3.182446 * 0.02 / 2
      0.031824
    """
    check_float("uncertainty", level, above=0, below=1)
    quantile = float(t.ppf((1 + level) / 2, num_iterates - 1))
    half = quantile * stddev / np.sqrt(num_iterates)
    low, high = mean - half, mean + half
    if of_probabilities:
        return np.maximum(low, 0.0), np.minimum(high, 1.0)
    return low, high


def column_names(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns output -> columns of its prediction, stddev, low and high.

    Example:
      >>> column_names(["probability"])
      {'probability': ('probability', 'stddev', 'low', 'high')}
      >>> column_names(["rating", "click"])["click"]
      ('click', 'click_stddev', 'click_low', 'click_high')

    Raises:
      InputError: two columns have one name.
    """
    prefixes = {name: f"{name}_" if len(names) > 1 else "" for name in names}
    found = {n: (n, *(prefixes[n] + part for part in _PARTS)) for n in names}
    columns = [column for several in found.values() for column in several]
    for column in columns:
        if columns.count(column) > 1:
            raise InputError(
                f"Expected outputs whose columns beside intervals differ; two are "
                f"{column!r}. Rename an output of the model, or omit --uncertainty."
            )
    return found


def interval_columns(
    outputs: Mapping[str, Outputs], level: float
) -> dict[str, np.ndarray]:
    """Returns means, standard deviations and ends, each (examples, ...).

    Args:
      outputs: Name -> predictions of at least two iterates.
      level: Level of the intervals, in (0, 1).

    Raises:
      InputError: as for ``column_names``, which has the names of the arrays.
    """
    columns: dict[str, np.ndarray] = {}
    for name, names in column_names(list(outputs)).items():
        one = outputs[name]
        ends = student_interval(
            one.mean,
            one.stddev,
            num_iterates=one.num_iterates,
            level=level,
            of_probabilities=one.task != OTHER,
        )
        columns |= zip(names, (one.mean, one.stddev, *ends), strict=True)
    return columns


def majority_metrics(labels: np.ndarray, outputs: Outputs) -> Metrics:
    """Returns the metrics of the majority vote.

    The AUC is that of the share of votes, which has only k + 1 levels: examples tie,
    and ties count half.  A share of 0 or 1 is no probability: there is no log loss.

    Args:
      labels: 0 or 1, shape (examples,); or classes or one-hot, as of ``correct``.
      outputs: Outputs of k iterates for the same examples.
    """
    share, num_examples = outputs.vote_share, len(labels)
    if outputs.task == BINARY:
        right = outputs.majority == (labels > 0)
        found: Metrics = {"auc": auc(labels, share), "log_loss": None}
    else:
        right, found = correct(labels, share), {"log_loss": None}
    return {**found, "accuracy": float(right.mean()), "num_examples": num_examples}
