"""Tasks, their labels, and their metrics on held-out examples.  Needs only NumPy.

    task     labels                    held-out metrics      outputs of the export
    binary   0 or 1                    AUC, log loss,        the probability of 1
                                       accuracy, and the
                                       error of calibration
    classes  a class, or its one-hot   accuracy, log loss    one probability per class
    other    any finite number         mean loss             those of the network

The privacy statement does not protect the held-out examples.

No constant has a better log loss, accuracy or loss than ``guessing``.  ``auc`` is
exact: the probability that a positive scores above a negative, where ties count half.
``Scores`` keeps a few numbers of every row: its label and score, or its loss and
whether the prediction is correct.  It keeps labels and predictions only for a user's
metric.

Public: metrics, if the held-out examples need no protection.  Sensitive: rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError

#: The column that is predicted; all others are inputs.
LABEL = "label"

BINARY = "binary"
CLASSES = "classes"
OTHER = "other"

#: Keras names of losses, and the task of each.
LOSSES = {
    "binary_crossentropy": BINARY,
    "sparse_categorical_crossentropy": CLASSES,
    "categorical_crossentropy": CLASSES,
    "mean_squared_error": OTHER,
    "mean_absolute_error": OTHER,
    "mean_absolute_percentage_error": OTHER,
    "mean_squared_logarithmic_error": OTHER,
    "huber": OTHER,
    "log_cosh": OTHER,
    "poisson": OTHER,
}

#: Names of each task's held-out metrics, the one to judge by first.
METRICS = {
    BINARY: ("auc", "log_loss", "accuracy", "calibration_error"),
    CLASSES: ("accuracy", "log_loss"),
    OTHER: ("loss",),
}

#: Metrics of a number that is predicted, whatever loss it was trained with.
SQUARED_ERROR, ABSOLUTE_ERROR = "mean_squared_error", "mean_absolute_error"

#: Metrics of which a smaller value is better.
LOWER_IS_BETTER = (
    "calibration_error", "log_loss", "loss", SQUARED_ERROR, ABSOLUTE_ERROR
)  # fmt: skip

#: Number of groups of rows of similar probability, in which it is compared with labels.
_CALIBRATION_GROUPS = 10

#: Loss -> what the best constant loses.
_CONSTANTS = {
    SQUARED_ERROR: lambda y: float(np.square(y - y.mean()).mean()),
    ABSOLUTE_ERROR: lambda y: float(np.abs(y - np.median(y)).mean()),
}

#: Loss -> how often it has the label's unit as a factor.
_UNITS = {SQUARED_ERROR: 2, ABSOLUTE_ERROR: 1}

#: Name -> value; None where it is not defined.
Metrics = dict[str, float | int | None]

#: (labels, predictions) of all held-out rows -> one number.
Metric = Callable[[Any, Any], float]


def auc(labels: np.ndarray, scores: np.ndarray) -> float | None:
    """Returns the area under the ROC curve; None where all labels are equal.

    Args:
      labels: 0 or 1, (rows,).
      scores: Higher for label 1, (rows,).

    Example:
      >>> auc(np.array([0, 1, 1]), np.array([0.5, 0.5, 2.0]))
      0.75
    """
    positive = labels > 0
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if not num_positive or not num_negative:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = mean_rank[place][positive].sum()
    above = rank_sum - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Returns the mean binary cross-entropy in nats.

    Args:
      labels: 0 or 1, (rows,).
      logits: (rows,).
    """
    signed = np.where(labels > 0, logits, -logits).astype(np.float64)
    return float(np.logaddexp(0, -signed).mean())


def calibration_error(labels: np.ndarray, logits: np.ndarray) -> float:
    """Returns by how much probabilities differ from the shares of ones, on average.

    The average is over ten groups of equally many rows of similar probability: Naeini
    et al. (2015), "Obtaining well calibrated probabilities using Bayesian binning".

    Args:
      labels: 0 or 1, (rows,).
      logits: (rows,).

    Example:
      >>> calibration_error(np.array([0, 1, 0, 1]), np.zeros(4))
      0.5
    """
    order = np.argsort(logits, kind="stable")
    chances = 0.5 * (1 + np.tanh(0.5 * logits[order].astype(np.float64)))
    apart = np.array_split(chances - (labels[order] > 0), _CALIBRATION_GROUPS)
    return float(sum(abs(group.sum()) for group in apart) / len(labels))


def binary_metrics(labels: np.ndarray, logits: np.ndarray) -> Metrics:
    """Returns the metrics of a task "binary".

    Args:
      labels: 0 or 1, (rows,).
      logits: (rows,); 0 predicts 0.
    """
    return {
        "auc": auc(labels, logits),
        "log_loss": log_loss(labels, logits),
        "accuracy": float(((logits > 0) == (labels > 0)).mean()),
        "calibration_error": calibration_error(labels, logits),
        "num_examples": len(labels),
    }


def correct(labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Returns the share of each row's classes that the outputs predict, (rows,).

    Args:
      labels: Classes (rows, ...), or one-hot (rows, ..., classes); masked where
        positions do not count, as the result is where none does.
      outputs: Shape (rows, ..., classes).

    Example:
      >>> correct(np.array([1, 0]), np.array([[0.0, 3.0], [0.0, 3.0]])).tolist()
      [1.0, 0.0]
    """
    if labels.ndim == outputs.ndim:
        hidden = np.ma.getmaskarray(labels)[..., 0]
        classes = np.ma.getdata(labels).argmax(-1)
        labels = np.ma.array(classes, mask=hidden) if hidden.any() else classes
    right = outputs.argmax(-1) == labels
    return right.reshape(len(right), -1).mean(1)


def guessing(labels: Any, *, task: str, loss: str) -> Metrics | None:
    """Returns the metrics of the best constant; None where it is not known.

    Args:
      labels: Labels of all rows, (rows, ...).
      task: "binary", "classes" or "other".
      loss: Keras's name of the loss.

    Example:
      >>> guessing(np.array([0, 0, 0, 1]), task="binary", loss="binary_crossentropy")
      {'auc': 0.5, 'log_loss': 0.5623351446188083, 'accuracy': 0.75}
    """
    if isinstance(labels, Mapping):
        return None
    if task in (BINARY, CLASSES):
        one_hot = task == CLASSES and loss == "categorical_crossentropy"
        classes = labels.argmax(-1) if one_hot else labels
        if classes.size != len(classes):
            return None
        found = _of_shares(np.unique(classes, return_counts=True)[1])
        return {"auc": 0.5, **found} if task == BINARY else found
    if loss not in _CONSTANTS or labels.size != len(labels):
        return None
    return {"loss": _CONSTANTS[loss](labels.astype(np.float64).ravel())}


def _of_shares(counts: np.ndarray) -> Metrics:
    shares = counts / counts.sum()
    entropy = -float((shares * np.log(shares)).sum())
    return {"log_loss": entropy + 0.0, "accuracy": float(shares.max())}


def unit_of_loss(loss: str, unit: float) -> float:
    """Returns how much of a loss of labels is 1 of their scaled numbers.

    Args:
      loss: Keras's name of the loss.  Others than squared and absolute errors do not
        scale with their labels, and stay those of the numbers.
      unit: How much of the label's unit a number of 1 is.

    Example:
      >>> unit_of_loss("mean_squared_error", 10.0)
      100.0
    """
    return float(unit ** _UNITS.get(loss, 0))


def metric_names(fields: Mapping[str, Any]) -> list[str]:
    """Returns the names of the metrics in a point of the curve or in metrics.json.

    Example:
      >>> metric_names({"step": 3, "auc": 0.5, "log_loss": 0.7, "num_examples": 9})
      ['auc', 'log_loss']
    """
    known = "step", "num_examples", "examples", "guessing", "method", "l2_norm_clip"
    return [
        name
        for name, value in fields.items()
        if name not in known and isinstance(value, (int, float, type(None)))
    ]


def name_of(metric: Metric) -> str:
    """Returns the name under which a user's metric is reported."""
    return getattr(metric, "__name__", type(metric).__name__)


def in_words(name: str) -> str:
    """Returns the name of a metric for titles and axes."""
    return "AUC" if name == "auc" else name.replace("_", " ")


def joined(parts: Sequence[Any]) -> Any:
    """Returns the concatenated parts, each an array or a dict of arrays."""
    if isinstance(parts[0], Mapping):
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        return np.ma.concatenate(parts)
    return np.concatenate(parts)


class Scores:
    """Accumulates the metrics of rows that arrive in parts.

    Args:
      task: "binary", "classes" or "other".
      metric: A user's metric, reported under the name of its function; None for none.
    """

    def __init__(self, task: str, metric: Metric | None = None) -> None:
        self._task = task
        self._metric = metric
        self._kept: dict[str, list[Any]] = {}
        self._num_examples = 0

    def add(self, *, labels: Any, outputs: Any, losses: Any, predictions: Any) -> None:
        """Adds rows: NumPy arrays, or dicts of them.  Sensitive.

        Args:
          labels: (rows, ...).
          outputs: Outputs of the network, (rows, ...).
          losses: (rows,).
          predictions: Outputs of the exported model, (rows, ...).
        """
        self._num_examples += len(losses)
        if self._task == BINARY:
            self._keep("label", labels)
            self._keep("logit", outputs.reshape(-1))
        else:
            self._keep("loss", losses)
        if self._task == CLASSES:
            self._keep("correct", correct(labels, outputs))
        if self._metric is not None:
            self._keep("labels", labels)
            self._keep("predictions", predictions)

    def _keep(self, name: str, values: Any) -> None:
        self._kept.setdefault(name, []).append(values)

    def _all(self, name: str) -> Any:
        return joined(self._kept[name])

    def metrics(self) -> Metrics:
        """Returns the metrics, the one to judge by first, and ``num_examples``.

        Raises:
          InputError: the user's metric is not a finite number.
        """
        if self._task == BINARY:
            found = binary_metrics(self._all("label"), self._all("logit"))
        else:
            loss = float(self._all("loss").mean(dtype=np.float64))
            found = {"loss": loss}
            if self._task == CLASSES:
                accuracy = float(self._all("correct").mean(dtype=np.float64))
                found = {"accuracy": accuracy, "log_loss": loss}
            found["num_examples"] = self._num_examples
        if self._metric is not None:
            found |= self._own_metric(self._metric)
        return found

    def _own_metric(self, metric: Metric) -> dict[str, float]:
        name = name_of(metric)
        value = metric(self._all("labels"), self._all("predictions"))
        # bool: mypy's type guard of np.isscalar would narrow ``value`` to str, too.
        if not bool(np.isscalar(value)) or not np.isfinite(value):
            raise InputError(
                f"Expected metric {name} to return one finite number. Fix it, or "
                "omit --metric."
            )
        return {name: float(value)}
