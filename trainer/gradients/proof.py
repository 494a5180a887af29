"""Proves that one pass gives the gradients of all examples, and finds what it needs.

Formal guarantees:
  - If ``proof_of`` has no obstacle, the loss of an example is a function of its own row
    and the weights (see ``row_independence``), and it depends on trainable variables
    through the uses of ``pieces`` alone (see ``weight_uses``).
  - The proof is of the graph whose copies every step computes (see ``traced_losses``).
  - A table of ``table_reads`` is used by look-ups alone: a step reads no other rows.
  - Its ids depend on no variable and on no lookup table: they are known before any
    weight is read.

Public: everything but columns and ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.core.run.redact_errors import place_of
from trainer.core.step.clipping import filled, keep_rows, real_rows
from trainer.core.step.pure_graph import check_eager, in_graph
from trainer.core.tf_compat import tf
from trainer.gradients.row_independence import (
    Kind,
    PerRow,
    classify,
    losses_obstacle,
)
from trainer.gradients.traced_losses import TracedLosses, copy_into, trace
from trainer.gradients.weight_uses import (
    LOOK_UPS,
    Piece,
    UnknownUseError,
    ancestors,
    find_pieces,
)
from trainer.model.trainable_model import TrainableModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What is known of the traced losses of a model.

    Attributes:
      variables: The trainable variables.
      obstacle: Why one pass would be wrong; None if it is exact.
      refusal: Why no way of computing gradients is right; None if one may be.
      traced: The traced graph; None if the model cannot be traced.
      kinds: Kinds of the graph's tensors by name.
      pieces: All pieces of weights.
    """

    variables: tuple[Any, ...]
    obstacle: str | None = None
    refusal: str | None = None
    traced: TracedLosses | None = None
    kinds: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()

    @property
    def graph(self) -> TracedLosses:
        """The proven graph.

        Raises:
          InputError: there is an obstacle.
        """
        if self.traced is None or self.obstacle is not None:
            raise InputError(
                "Expected a model whose gradients one pass computes; here "
                f"{self.obstacle}."
            )
        return self.traced


def proof_of(model: TrainableModel) -> Proof:
    """Returns what is known of the traced losses of a model, which is traced once."""
    return model.kept(_proof_of)


def _proof_of(model: TrainableModel) -> Proof:
    check_eager()
    variables = tuple(model.variables)
    try:
        traced = trace(model)
    except InputError as error:
        return Proof(variables=variables, obstacle=str(error), refusal=str(error))
    except tf.errors.OperatorNotAllowedInGraphError as error:
        why = (
            "Expected a model and a loss without a Python if, while or for on the "
            f"values of tensors ({place_of(error)}). Use keras.ops.where or "
            "keras.ops.cond."
        )
        return Proof(variables=variables, obstacle=why, refusal=why)
    except Exception as error:  # of users' layers, for a batch of unknown size
        why = f"it cannot be traced ({type(error).__name__})"
        return Proof(variables=variables, obstacle=why)
    return prove(traced, variables)


def prove(traced: TracedLosses, variables: Sequence[Any]) -> Proof:
    """Returns what is known of traced losses.

    Args:
      traced: The graph of the losses.
      variables: The trainable variables.
    """
    found = Proof(variables=tuple(variables), traced=traced)
    for variable in variables:
        if variable.dtype != tf.float32:
            why = f"{variable.name} is not of type float32"
            return dataclasses.replace(found, obstacle=why)
    kinds = classify(traced.graph, traced.columns)
    try:
        pieces = _pieces(traced, kinds, variables)
    except UnknownUseError as error:
        return dataclasses.replace(found, obstacle=str(error))
    return dataclasses.replace(found, kinds=kinds, pieces=tuple(pieces))


def obstacle(model: TrainableModel) -> str | None:
    """Returns why one pass would be wrong for a model; None if it is exact."""
    return proof_of(model).obstacle


def check_function(model: TrainableModel) -> None:
    """Checks that the losses are a function of columns and weights.

    Raises:
      InputError: an operation writes, draws, keeps a state or calls Python.
    """
    refusal = proof_of(model).refusal
    if refusal is not None:
        raise InputError(refusal)


def _pieces(
    traced: TracedLosses, kinds: Mapping[str, Kind], variables: Sequence[Any]
) -> list[Piece]:
    """Returns all pieces of weights.

    Raises:
      UnknownUseError: rows may mix, or a use is not known.
    """
    why = losses_obstacle(traced.losses, kinds)
    if why is not None:
        raise UnknownUseError(why)
    pieces = find_pieces(
        traced.losses, variables, lambda value: isinstance(kinds[value.name], PerRow)
    )
    for use in (use for piece in pieces for use in piece.uses):
        for value in (use.other, use.op.outputs[0]):
            kind = kinds[value.name]
            if not isinstance(kind, PerRow) or kind.axis:
                raise UnknownUseError(
                    f"axis 0 of {value.name}, which meets a weight, is not the batch"
                )
    return pieces


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

    The result is None if the model's proof has an obstacle, if no table is used by
    look-ups alone, if ids of any table depend on weights or a lookup table, or if the
    number of ids is not static.

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
    if not isinstance(kind, PerRow) or None in sizes:
        return None
    return kind.per_example * math.prod(sizes)


def _flat(ids: Any) -> Any:
    return tf.reshape(tf.cast(ids, tf.int32), (-1,))
