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

from accounting.validation import InputError
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import keras, tf

_OTHER_METHOD = "Take another --method."


@contextlib.contextmanager
def replaced_weights(
    model: TrainableModel, weights: Sequence[Any], *, remedy: str = _OTHER_METHOD
) -> Iterator[None]:
    """Replaces the weights of ``model`` within a context.

    Args:
      model: Model that is built.
      weights: A tensor for each variable, in order and of its shape.
      remedy: Last sentence of the error: what a user can do.

    Raises:
      InputError: the model read one of its variables; raised at the end.
    """
    scope = keras.StatelessScope(zip(model.optimized, weights, strict=True))
    with tf.GradientTape() as tape, scope:
        yield
    own = {variable.ref() for variable in model.variables}
    for variable in tape.watched_variables():
        if variable.ref() in own:
            raise InputError(
                f"Expected {variable.name} to be read as a keras.Variable; the model "
                f"reads its tf.Variable, which cannot be replaced. {remedy}"
            )


def check_replaceable(model: TrainableModel, *, remedy: str = _OTHER_METHOD) -> None:
    """Checks that ``replaced_weights`` can replace the weights of a model.

    Args:
      model: Model that is built.
      remedy: Last sentence of the error: what a user can do.

    Raises:
      InputError: a layer does not read a weight as a Keras variable.
    """
    zeros = {
        name: tf.zeros([size or 1 for size in spec.shape], spec.dtype)
        for name, spec in model.column_specs.items()
    }
    weights = [tf.identity(variable) for variable in model.variables]
    with replaced_weights(model, weights, remedy=remedy):
        model.losses(zeros)
