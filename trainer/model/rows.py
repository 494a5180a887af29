"""The rows of a table: what is predicted, in the user's words, and rows of users.

What a model predicts: the label of the user's table, by the user's own names.

Public: everything.

Users as examples: the gradient of the mean loss of a user's rows is clipped.

`dpsgd prepare --sample users` writes records of at most k rows, in columns (k, ...),
and a column of weights, 0 for padding.  The model, held-out data, exports and
predictions are of single rows; ``grouped_model.of_users`` is trained.

Formal guarantees:
  - One user changes the sum of a step by the clip norm, whatever rows the user has.
  - Padding contributes exactly nothing, whatever it holds.

Public: names and numbers.  Sensitive: rows and weights.

References:
  Charles et al. (2024), arXiv:2407.07737, "user-level sampling".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.core.batches.manifest import Column, Manifest
from pipelines.core.users import ROW_WEIGHTS, Bounded
from pipelines.tables.schema import DATASET_NAME, Schema
from trainer.model.metrics import LABEL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A column that is predicted.

    Attributes:
      name: Its name in the user's table, or in the batches if they have no schema.
      classes: Its values that became 0, 1, ...; empty if they have no names.
      range: Range of a number, which became [-1, 1]; None of others.
    """

    name: str
    classes: tuple[str, ...] = ()
    range: tuple[float, float] | None = None

    @property
    def half_range(self) -> float:
        """How much of the label's unit a number of 1 is."""
        low, high = self.range or (-1.0, 1.0)
        return (high - low) / 2

    def in_units(self, numbers: np.ndarray) -> np.ndarray:
        """Returns numbers in [-1, 1] in the label's unit; without a range as they are.

        Args:
          numbers: Labels, or predictions of them.
        """
        if self.range is None:
            return numbers
        return numbers.astype(np.float64) * self.half_range + sum(self.range) / 2


def schema_of(manifest: Manifest) -> Schema | None:
    """Returns the schema of the training examples; None if they have none."""
    if manifest.dataset.get("name") != DATASET_NAME:
        return None
    return Schema.from_json(manifest.dataset["schema"], "the manifest of the run")


def target_of(manifest: Manifest) -> Target | None:
    """Returns what is predicted; None if the batches have no label of that name."""
    schema = schema_of(manifest)
    if schema is None:
        names = [column.name for column in manifest.columns]
        return Target(name=LABEL) if LABEL in names else None
    [name] = (name for name, kind in schema.columns.items() if kind is schema.label)
    classes = schema.label.classes
    return Target(
        name=name,
        classes=classes if isinstance(classes, tuple) else (),
        range=schema.label.range,
    )


def rows_per_user(manifest: Manifest) -> int:
    """Returns the rows per user, padding included; 1 if examples are rows."""
    bounded = Bounded.of(manifest.dataset)
    return bounded.max_examples_per_user if bounded and bounded.has_users else 1


def has_users(manifest: Manifest) -> bool:
    """Whether the examples are users."""
    bounded = Bounded.of(manifest.dataset)
    return bounded is not None and bounded.has_users


def of_one_row(manifest: Manifest) -> Manifest:
    """Returns the manifest with the columns of one row, without the axis of rows."""
    columns = columns_of_row(manifest.columns, manifest.dataset)
    return dataclasses.replace(manifest, columns=columns)


def columns_of_row(
    columns: tuple[Column, ...], description: dict[str, Any]
) -> tuple[Column, ...]:
    """Returns the columns of one row, without the axis of rows.

    Args:
      columns: Columns of the examples.
      description: The data set's own description, with the note of `dpsgd prepare`.
    """
    bounded = Bounded.of(description)
    if bounded is None or not bounded.has_users:
        return columns
    return tuple(
        dataclasses.replace(column, shape=column.shape[1:])
        for column in columns
        if column.name != ROW_WEIGHTS
    )


def as_table(arrays: Mapping[str, np.ndarray]) -> pa.Table:
    """Returns arrays (rows, ...) as columns; those of shape (rows, 1) as numbers."""
    return pa.table({name: _as_column(value) for name, value in arrays.items()})


def _as_column(values: np.ndarray) -> pa.Array:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    column = pa.array(np.ravel(values))
    for size in values.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
