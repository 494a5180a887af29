"""Examples that are users: the mean loss over the rows of one is clipped as a whole.

`dpsgd bound --sample users` writes records of at most k rows, in columns (k, ...), and
a column of weights that tells rows from padding.  The model is one of a row, and so are
held-out data, exports and predictions; ``grouped_model.of_users`` is what is trained.

Formal guarantees:
  - One user changes the sum of a step by the clip norm, whatever rows the user has.
  - Padding contributes exactly nothing, whatever it holds.

Public: names and numbers.  Sensitive: rows and weights.

References:
  Charles et al. (2024), arXiv:2407.07737, "user-level sampling".
"""

from __future__ import annotations

import dataclasses

from pipelines.batches.manifest import Manifest
from pipelines.inputs.bounded import ROW_WEIGHTS, Bounded


def rows_per_user(manifest: Manifest) -> int:
    """Returns the rows of an example that is a user, padding included; else 1."""
    bounded = Bounded.of(manifest.dataset)
    return bounded.max_examples_per_user if bounded and bounded.has_users else 1


def has_users(manifest: Manifest) -> bool:
    """Whether an example is a user."""
    bounded = Bounded.of(manifest.dataset)
    return bounded is not None and bounded.has_users


def of_one_row(manifest: Manifest) -> Manifest:
    """Returns the manifest as a model of one row sees it: without the axis of rows."""
    if not has_users(manifest):
        return manifest
    return dataclasses.replace(
        manifest,
        columns=tuple(
            dataclasses.replace(column, shape=column.shape[1:])
            for column in manifest.columns
            if column.name != ROW_WEIGHTS
        ),
    )
