"""Which rows of embedding tables a physical batch reads, before any weight is read.

Formal guarantees:
  - A table of ``table_reads`` is used by look-ups alone: a step reads no other rows.
  - The ids depend on no variable and on no lookup table.

Public: everything but the ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.core.step.per_example import filled, keep_rows, real_rows
from trainer.core.step.tracing import in_graph
from trainer.core.tf_compat import tf
from trainer.gradients.engine.proof import Proof, proof_of
from trainer.gradients.engine.row_independence import Rows
from trainer.gradients.engine.traced_losses import copy_into
from trainer.gradients.engine.weight_uses import LOOK_UPS, Piece, ancestors
from trainer.model.trainable_model import TrainableModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableReads:
    """Which rows of embedding tables a physical batch reads.

    Attributes:
      tables: Variables of the tables.
      num_ids: Number of ids that one example has in each table.
      ids: (columns, weight) -> ids for each table, flat int32, with those of padding.
        Sensitive.
    """

    tables: tuple[Any, ...]
    num_ids: tuple[int, ...]
    ids: Callable[[Mapping[str, Any], Any], list[Any]]


def table_reads(model: TrainableModel) -> TableReads | None:
    """Returns the rows that a model reads.

    None if its proof has an obstacle, if it has no table that is used by look-ups
    alone, if ids of any table depend on weights or a lookup table, or if their number
    is not static.

    Args:
      model: Model and its loss.
    """
    proof = proof_of(model)
    if proof.obstacle is not None or ids_depend_on_weights(proof):
        return None
    pieces = sorted((p for p in proof.pieces if _is_table(p)), key=_variable)
    counts = [_num_ids(piece, proof) for piece in pieces]
    if not pieces or None in counts:
        return None
    ids_of = [[use.op.inputs[1] for use in piece.uses] for piece in pieces]

    def ids(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        # A step computes rows of zeros, too, which read their ids.
        columns, weight = filled((dict(columns), weight), weight.shape[0])
        safe = keep_rows(columns, real_rows(model, columns, weight))
        needed = [value for values in ids_of for value in values]
        copy = copy_into(proof.graph, safe, results=needed)
        return [
            tf.concat([_flat(copy.of(value)) for value in values], 0)
            for values in ids_of
        ]

    return TableReads(
        tables=tuple(model.variables[piece.variable] for piece in pieces),
        num_ids=tuple(count for count in counts if count is not None),
        ids=in_graph(ids),
    )


def ids_depend_on_weights(proof: Proof) -> bool:
    """Whether ids of a look-up depend on a variable or a lookup table.

    Args:
      proof: Proof without obstacle.
    """
    read = set[str]()
    for use in (use for piece in proof.pieces for use in piece.uses):
        if use.op.type in LOOK_UPS:
            read |= ancestors(use.op.inputs[1])
    resources = (inner for _, inner in proof.graph.graph.captures)
    return any(x.op.name in read for x in resources if x.dtype == tf.resource)


def _is_table(piece: Piece) -> bool:
    """Whether a piece is a whole variable of which only rows are read."""
    return not piece.path and piece.reads_rows


def _variable(piece: Piece) -> int:
    return piece.variable


def _num_ids(piece: Piece, proof: Proof) -> int | None:
    """Returns the number of ids of one example; None if it is not static."""
    found: Sequence[int | None] = [
        _num_ids_of(use.op.inputs[1], proof) for use in piece.uses
    ]
    return None if None in found else sum(x for x in found if x is not None)


def _num_ids_of(ids: Any, proof: Proof) -> int | None:
    kind, sizes = proof.kinds[ids.name], ids.shape.as_list()[1:]
    if not isinstance(kind, Rows) or None in sizes:
        return None
    return kind.per_example * math.prod(sizes)


def _flat(ids: Any) -> Any:
    return tf.reshape(tf.cast(ids, tf.int32), (-1,))
