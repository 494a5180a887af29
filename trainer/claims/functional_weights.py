"""Calls of a Keras model with weights other than its variables.

Formal guarantees:
  - In ``replaced_weights`` the model computes with the given weights alone; otherwise
    an error is raised: a layer that reads a variable in another way is found.
  - The variables keep their values.

Public: names of variables.  Sensitive: weights that depend on an example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.core.step.tracing import trace_eagerly
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import keras, tf

_REMEDY = "Give bam_variant='hvp', as a flag: --bam-variant hvp."


@contextlib.contextmanager
def replaced_weights(model: TrainableModel, weights: Sequence[Any]) -> Iterator[None]:
    """Replaces the weights of ``model`` within a context of a graph.

    Args:
      model: Model that is built.
      weights: A tensor for each variable, in order and of its shape.

    Raises:
      InputError: the model read one of its variables; raised at the end.
    """
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    with keras.StatelessScope(zip(model.optimized, weights, strict=True)):
        yield
    # By the operations, not by a tape, which sees no raw read of a handle.
    names = {id(variable.handle): variable.name for variable in model.variables}
    own = {
        inner.op.name: names[id(outer)]
        for outer, inner in graph.captures
        if id(outer) in names
    }
    for operation in graph.get_operations()[num_before:]:
        for read in (own.get(value.op.name) for value in operation.inputs):
            if read is not None:
                raise InputError(
                    f"Expected {read} to be read as a keras.Variable; the model reads "
                    f"its tf.Variable, which cannot be replaced. {_REMEDY}"
                )


def check_replaceable(model: TrainableModel) -> None:
    """Checks that ``replaced_weights`` can replace the weights of a model.

    Args:
      model: Model that is built.

    Raises:
      InputError: a layer does not read a weight as a Keras variable.
    """

    def replaced(columns: Any) -> Any:
        weights = [tf.zeros(v.shape, v.dtype) for v in model.variables]
        with replaced_weights(model, weights):
            return model.losses(columns)

    trace_eagerly(replaced, model.column_specs)
