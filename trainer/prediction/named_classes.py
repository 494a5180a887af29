"""Predictions in the words and units of the label.

    binary    predicted, probability (of the second class)
    classes   predicted, probabilities; with names, probability_NAME of each class
    a number  prediction, in the units of the label whose range the schema has

The same holds for all columns with one number per class, such as ``vote_share``, and
``stddev``, ``low`` and ``high`` of intervals.  Without names in the schema, a class is
its number.

Formal guarantees:
  - ``predicted`` is the class that held-out accuracy counts, up to rounding: label 1
    above probability 0.5, and the first of the most probable classes.
  - ``column_names`` names the columns of ``with_classes``.

Public: names of classes.  Sensitive: rows, and predictions as their owner decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.averaging.uncertainty import in_units
from trainer.export.serving import PREDICTION, PROBABILITIES, PROBABILITY
from trainer.model.metrics import BINARY, CLASSES, OTHER
from trainer.prediction.chosen_model import ChosenModel

#: Column of the predicted class.
PREDICTED = "predicted"


def named(
    found: Mapping[str, np.ndarray], chosen: ChosenModel
) -> dict[str, np.ndarray]:
    """Returns predictions of a model as its table's owner names them.

    Args:
      found: Column -> predictions, as for `with_classes`.
      chosen: The model.
    """
    serving, target = chosen.serving, chosen.target
    if target is None or target.range is None or serving.outputs != (PREDICTION,):
        return with_classes(found, serving.task, chosen.classes)
    return in_units(found, target)


def with_classes(
    found: Mapping[str, np.ndarray], task: str, classes: Sequence[str]
) -> dict[str, np.ndarray]:
    """Returns predictions with the predicted class first.

    Args:
      found: Column -> predictions (rows, ...), the first of them probabilities, or the
        number of the predicted class under ``PREDICTED``.
      task: Task of the loss: "binary", "classes" or "other".
      classes: Names of the classes; empty for none.
    """
    if task == OTHER:
        return dict(found)
    first, most = next(iter(found.items()))
    number = most if first == PREDICTED else _number(most, task)
    # A model may have more classes than the table, or several labels in a row.
    named = number.ndim == 1 and (task == BINARY or _widths(found) == {len(classes)})
    if not (classes and named):
        return {PREDICTED: number, **_without_predicted(found)}
    columns: dict[str, np.ndarray] = {PREDICTED: np.array(classes, object)[number]}
    for column, values in _without_predicted(found).items():
        parts = values.T if task == CLASSES else [values]
        columns |= zip(_parts(column, task, classes), parts, strict=True)
    return columns


def column_names(
    columns: Sequence[str], task: str, classes: Sequence[str]
) -> tuple[str, ...]:
    """Returns the names that may be given; other arguments as for `with_classes`.

    Args:
      columns: Names of the columns of predictions.
    """
    if task == OTHER:
        return tuple(columns)
    rest = [column for column in columns if column != PREDICTED]
    named = [each for column in rest for each in _parts(column, task, classes)]
    return tuple(dict.fromkeys((PREDICTED, *named, *rest)))


def _number(probabilities: np.ndarray, task: str) -> np.ndarray:
    if task == BINARY:
        return (probabilities.reshape(-1) > 0.5).astype(np.int8)
    return probabilities.argmax(-1).astype(np.int32)


def _widths(found: Mapping[str, np.ndarray]) -> set[int]:
    return {values.shape[-1] for values in _without_predicted(found).values()}


def _without_predicted(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values for name, values in found.items() if name != PREDICTED}


def _parts(column: str, task: str, classes: Sequence[str]) -> list[str]:
    if task == BINARY or not classes:
        return [column]
    one = PROBABILITY if column == PROBABILITIES else column
    return [f"{one}_{name}" for name in classes]
