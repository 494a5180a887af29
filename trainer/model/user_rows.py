"""Users as examples: the gradient of the mean loss of a user's rows is clipped.

`dpsgd bound --sample users` writes records of at most k rows, in columns (k, ...), and
a column of weights, 0 for padding.  The model, held-out data, exports and predictions
are of single rows; ``grouped_model.of_users`` is trained.

Formal guarantees:
  - One user changes the sum of a step by the clip norm, whatever rows the user has.
  - Padding contributes exactly nothing, whatever it holds.

Public: names and numbers.  Sensitive: rows and weights.

References:
  Charles et al. (2024), arXiv:2407.07737, "user-level sampling".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pipelines.core.batches.columns import Column
from pipelines.core.batches.manifest import Manifest
from pipelines.core.users.bounded import ROW_WEIGHTS, Bounded


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
      description: The data set's own description, with the note of `dpsgd bound`.
    """
    bounded = Bounded.of(description)
    if bounded is None or not bounded.has_users:
        return columns
    return tuple(
        dataclasses.replace(column, shape=column.shape[1:])
        for column in columns
        if column.name != ROW_WEIGHTS
    )
