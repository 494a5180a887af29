"""A model of groups of rows: the loss of a group is the mean loss of its rows.

    loss of group i = sum_r w_ir loss(row ir) / sum_r w_ir

A group is the views of one example (augmentation multiplicity), with equal weights, or
the rows of one user, padded to a constant number with rows of weight 0.  The network
computes all rows of all groups at once.  Gradients are summed over the rows of a group
before they are clipped.

Formal guarantees:
  - The loss of a group is a function of its own rows and weights.
  - A row of weight 0 contributes exactly nothing, whatever it holds, NaN included.
  - A group whose rows all have weight 0 has a loss of exactly 0.

Public: sizes and names.  Sensitive: rows, weights and losses.

References:
  De et al. (2022), arXiv:2204.13650, Section 3.2; Sander, Stock and Sablayrolles
  (2023), arXiv:2210.03403, for views.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipelines.core.batches.manifest import Manifest
from pipelines.core.users.bounded import ROW_WEIGHTS
from trainer.model.trainable_model import TrainableModel
from trainer.model.user_rows import has_users, rows_per_user
from trainer.tf_compat import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedModel(TrainableModel):
    """A model of groups of rows.

    Attributes:
      of_row: The model of one row.
      size: Rows of a group.
      by_row: Columns (batch, size, ...) with one value per row; the rows of a group
        share the values of all other columns.
      row_weights: Column (batch, size) of weights, at least 0; None for equal weights.
    """

    of_row: TrainableModel
    size: int
    by_row: frozenset[str]
    row_weights: str | None = None

    @property
    def rows_per_example(self) -> int:
        """Number of rows that the network computes per example."""
        return self.size * self.of_row.rows_per_example

    def outputs(self, columns: Mapping[str, Any], *, training: bool = False) -> Any:
        """Returns the outputs for all rows; see `TrainableModel.outputs`."""
        return self.of_row.outputs(self._rows(columns), training=training)

    def losses(self, columns: Mapping[str, Any], outputs: Any = None) -> Any:
        """Returns the mean loss of each group, of shape (batch,).

        Args:
          columns: All columns of the groups.
          outputs: Outputs of the network for their rows; computed if None.
        """
        losses = self.of_row.losses(self._rows(columns), outputs)
        losses = tf.reshape(losses, (-1, self.size))
        if self.row_weights is None:
            return tf.reduce_sum(losses, 1) / self.size
        weights = self._weights(columns)
        # Not a product with 0, which is NaN for a loss of NaN.
        weighted = tf.where(weights > 0, losses * weights, 0.0)
        return tf.math.divide_no_nan(
            tf.reduce_sum(weighted, 1), tf.reduce_sum(weights, 1)
        )

    def accepts(self, columns: Mapping[str, Any]) -> Any:
        """Returns whether the loss takes all labels of positive weight, (batch,)."""
        accepted = self.of_row.accepts(self._rows(columns))
        accepted = tf.reshape(accepted, (-1, self.size))
        if self.row_weights is not None:
            accepted = tf.logical_or(accepted, self._weights(columns) == 0)
        return tf.reduce_all(accepted, 1)

    def _weights(self, columns: Mapping[str, Any]) -> Any:
        assert self.row_weights is not None
        return tf.cast(columns[self.row_weights], tf.float32)

    def _rows(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns of all rows, (batch * size, ...), zero in padding."""
        padding = None
        if self.row_weights is not None:
            padding = self._weights(columns) == 0
        rows = {}
        for name, value in columns.items():
            if name not in self.by_row:
                value = tf.expand_dims(value, 1)
                value = tf.tile(value, [1, self.size] + [1] * (len(value.shape) - 2))
            elif padding is not None:
                rank = len(value.shape) - 2
                there = tf.reshape(padding, [-1, self.size] + [1] * rank)
                value = tf.where(there, tf.zeros_like(value), value)
            rows[name] = tf.reshape(value, (-1, *value.shape[2:]))
        return rows


def of_users(model: TrainableModel, manifest: Manifest) -> TrainableModel:
    """Returns the model of users, if users are the examples of the batches.

    Args:
      model: Model of one row, with its views and seeds.
      manifest: Manifest of the batches.
    """
    if not has_users(manifest):
        return model
    size = rows_per_user(manifest)
    by_row = frozenset(column.name for column in model.columns)
    weights = [column for column in manifest.columns if column.name == ROW_WEIGHTS]
    return GroupedModel(
        network=model.network,
        description={**model.description, "rows_per_user": size},
        loss=model.loss,
        columns=(
            *(
                dataclasses.replace(column, shape=(size, *column.shape))
                for column in model.columns
            ),
            *weights,
        ),
        seeds=None if model.seeds is None else (size, *model.seeds),
        of_row=model,
        size=size,
        by_row=by_row,
        row_weights=ROW_WEIGHTS,
    )
