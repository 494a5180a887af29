"""What a model predicts: the label of the user's table, by the user's own names.

Public: everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from pipelines.core.batches.manifest import Manifest
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
