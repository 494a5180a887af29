"""Proves that one pass gives the gradients of all examples, and finds what it needs.

Formal guarantees:
  - If ``proof_of`` has no obstacle, the loss of an example is a function of its own row
    and the weights (see ``row_independence``), and it depends on trainable variables
    through the uses of ``pieces`` alone (see ``weight_uses``).
  - The proof is of the graph whose copies every step computes (see ``traced_losses``).

Public: everything here; no example is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.core.run.withheld import place_of
from trainer.core.step.tracing import check_eager
from trainer.core.tf_compat import tf
from trainer.gradients.engine.row_independence import (
    Kind,
    Rows,
    classify,
    losses_obstacle,
)
from trainer.gradients.engine.traced_losses import (
    TracedLosses,
    trace,
)
from trainer.gradients.engine.weight_uses import (
    Piece,
    UnknownUseError,
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
      kinds: Kinds of its tensors by name.
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
        traced.losses, variables, lambda value: isinstance(kinds[value.name], Rows)
    )
    for use in (use for piece in pieces for use in piece.uses):
        for value in (use.other, use.op.outputs[0]):
            kind = kinds[value.name]
            if not isinstance(kind, Rows) or kind.axis:
                raise UnknownUseError(
                    f"axis 0 of {value.name}, which meets a weight, is not the batch"
                )
    return pieces
