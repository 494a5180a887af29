"""What guessing gives: the metrics of the best constant prediction.  Needs only NumPy.

    task     constant                         its metrics
    binary   the share of ones                AUC 0.5, entropy, larger share
    classes  the shares of the classes        entropy, largest share
    other    the mean, of squared errors;     mean loss
             the median, of absolute errors

A model that is worse than guessing has learned nothing that can be used, whatever its
epsilon is.

Formal guarantees:
  - No constant has a better log loss, accuracy or loss on these rows.

Public: all of it, if the held-out examples need no protection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainer.model.metrics import (
    BINARY,
    CLASSES,
    LOWER_IS_BETTER,
    Metrics,
    in_words,
)

#: A calibration error above which a model's probabilities mislead.
_FAR_OFF = 0.05

_CONSTANTS = {
    "mean_squared_error": lambda y: float(np.square(y - y.mean()).mean()),
    "mean_absolute_error": lambda y: float(np.abs(y - np.median(y)).mean()),
}


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


def warnings(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each way in which a model is not fit for use.

    Args:
      metrics: The metrics of a run, with those of ``guessing`` under that name.
    """
    constant = metrics.get("guessing") or {}
    for name, value in constant.items():
        found = metrics.get(name)
        if found is None or name == "accuracy":
            continue
        lower = name in LOWER_IS_BETTER
        if (found >= value) if lower else (found <= value):
            yield (
                f"The model is no better than guessing: {in_words(name)} {found:.4f}, "
                f"guessing {value:.4f}. Try more --epochs, a larger --batch-size, or a "
                "smaller --learning-rate."
            )
            return
    error, count = metrics.get("calibration_error"), metrics.get("num_examples")
    if error is not None and count and error > _FAR_OFF + 1 / np.sqrt(count):
        yield (
            f"Its probabilities are off by {error:.2f} on average: use its order, not "
            "its probabilities. Try a smaller --learning-rate, or --average ema."
        )
