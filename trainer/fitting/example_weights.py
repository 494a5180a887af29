"""``class_weight`` and ``sample_weight`` of ``fit``: factors of each example's loss.

The gradient of the weighted loss is clipped, so a weight does not change the
sensitivity: an example of weight 10 still changes the sum by at most ``l2_norm_clip``,
and counts tenfold only if its gradient stays below the clip norm.

Formal guarantees:
  - The weight of an example is a function of its own row and of ``fit``'s arguments.
  - An example whose weight is negative or not finite contributes exactly nothing, as
    does one whose label the loss does not take.
  - A class that ``class_weight`` does not name has weight 1.

Public: classes, their weights and names of columns.  Weights computed from the training
labels are not public, and no privacy statement covers them.
Sensitive: weights of examples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from accounting.core.validation import InputError, check_float, check_int
from pipelines.core.batches.batch_format import Column
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleWeights:
    """The weights given to ``fit``.

    Attributes:
      class_weight: Class -> weight of at least 0; empty for none.
      sample_weight: Name of the column of weights; None for none.

    Raises:
      InputError: not a mapping of classes to weights, or not the name of a column.
    """

    class_weight: Mapping[int, float] = dataclasses.field(default_factory=dict)
    sample_weight: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.class_weight, Mapping):
            raise InputError(
                "Expected class_weight to be a dict of class to weight, as "
                "{0: 1.0, 1: 5.0}."
            )
        for label, weight in self.class_weight.items():
            check_int("class of class_weight", label, at_least=0)
            check_float(f"class_weight[{label}]", weight, at_least=0)
        if not isinstance(self.sample_weight, str | None):
            raise InputError(
                "Expected sample_weight to name a column of the batches: which row of "
                "an array is whose is not known here. Write the weights into a column "
                "of the table, such as 'importance', make the batches from it, and "
                "give sample_weight='importance'."
            )

    def __bool__(self) -> bool:
        return bool(self.class_weight) or self.sample_weight is not None

    def describe(self) -> dict[str, Any]:
        """Returns the entries of the run record."""
        weights = {str(label): float(w) for label, w in self.class_weight.items()}
        return {"class_weight": weights, "sample_weight": self.sample_weight}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedModel(TrainableModel):
    """A model whose loss is weighted by example.

    Attributes:
      weights: The weights of the examples.
    """

    weights: ExampleWeights

    def losses(self, columns: Mapping[str, Any], outputs: Any = None) -> Any:
        """Returns the weighted losses (batch,); see ``TrainableModel``."""
        return super().losses(columns, outputs) * self.example_weights(columns)

    def accepts(self, columns: Mapping[str, Any]) -> Any:
        """Returns whether each row has a valid label and weight, bool (batch,)."""
        weight = self.example_weights(columns)
        usable = tf.logical_and(tf.math.is_finite(weight), weight >= 0)
        return tf.logical_and(super().accepts(columns), usable)

    def example_weights(self, columns: Mapping[str, Any]) -> Any:
        """Returns the weight of each example, (batch,), float32."""
        factors = []
        if self.weights.class_weight:
            factors.append(self._of_class(self.labels(columns)))
        if self.weights.sample_weight is not None:
            factors.append(tf.cast(columns[self.weights.sample_weight], tf.float32))
        return functools.reduce(tf.multiply, factors)

    def _of_class(self, labels: Any) -> Any:
        classes = tf.argmax(labels, -1) if _is_one_hot(self) else labels
        # Double precision represents every integer label exactly.
        classes = tf.cast(classes, tf.float64)
        weight = tf.ones_like(classes, tf.float32)
        for label, of_class in self.weights.class_weight.items():
            weight = tf.where(tf.equal(classes, label), float(of_class), weight)
        return weight


def _is_one_hot(model: TrainableModel) -> bool:
    return model.loss.name == "categorical_crossentropy"


def weighted(model: TrainableModel, weights: ExampleWeights) -> TrainableModel:
    """Returns ``model`` with weighted losses; ``model`` itself without weights.

    Args:
      model: A model that ``check_model`` accepted.
      weights: The weights given to ``fit``.

    Raises:
      InputError: no such column, a column without one number per example, or labels
        that are not one class per example.
    """
    if not weights:
        return model
    columns = {column.name: column for column in model.columns}
    if weights.sample_weight is not None:
        _check_column(columns, weights.sample_weight, model)
    if weights.class_weight:
        _check_labels(columns, model)
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    return WeightedModel(**fields, weights=weights)


def _check_column(
    columns: Mapping[str, Column], name: str, model: TrainableModel
) -> None:
    if name not in columns:
        raise InputError(
            f"Expected sample_weight={name!r} to be a column of the batches: "
            f"{', '.join(columns)}."
        )
    if columns[name].shape != () or name in model.label_names:
        raise InputError(
            f"Expected sample_weight={name!r} to hold one number per example that is "
            f"not the label; its shape is {columns[name].shape}."
        )


def _check_labels(columns: Mapping[str, Column], model: TrainableModel) -> None:
    shapes = [columns[name].shape for name in model.label_names]
    rank = 1 if _is_one_hot(model) else 0
    if len(shapes) != 1 or len(shapes[0]) != rank:
        raise InputError(
            "Expected one class per example for class_weight; this model has labels "
            f"of shapes {shapes}. Give sample_weight, the name of a column."
        )
