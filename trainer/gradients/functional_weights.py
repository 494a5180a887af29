"""Calls of a Keras model with weights other than its variables.

Keras 2 cannot call a model as a function of (weights, inputs): layers read weights from
attributes, directly or in lists.  Here a context replaces these attributes by tensors,
which may differ between the examples of a vectorised map.

Formal guarantees:
  - In ``replaced_weights`` the model computes with the given weights alone; otherwise
    an error is raised: a layer that reads a variable in another way is found.
  - Afterwards every attribute has its old value.

Public: names of attributes.  Sensitive: weights that depend on an example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from accounting.validation import InputError
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import tf

#: Attributes that list a layer's weights, from which it does not compute.
_KERAS_LISTS = ("_trainable_weights", "_non_trainable_weights")
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
    variables = model.variables
    others = {v.ref(): w for v, w in zip(variables, weights, strict=True)}
    saved = []
    try:
        for layer in model.network._flatten_layers():
            # Through __dict__: Keras tracks attributes that are assigned.
            for name, value in list(vars(layer).items()):
                other = value if name in _KERAS_LISTS else _replace(value, others)
                if other is not value:
                    saved.append((layer, name, value))
                    vars(layer)[name] = other
        with tf.GradientTape() as tape:
            yield
        _check_unread(tape.watched_variables(), others, remedy)
    finally:
        for layer, name, value in saved:
            vars(layer)[name] = value


def check_replaceable(model: TrainableModel, *, remedy: str = _OTHER_METHOD) -> None:
    """Checks that ``replaced_weights`` can replace the weights of a model.

    Args:
      model: Model that is built.
      remedy: Last sentence of the error: what a user can do.

    Raises:
      InputError: a layer does not read a weight from its attribute.
    """
    (inputs,), _ = model.network.save_spec()
    zeros = tf.nest.map_structure(
        lambda spec: tf.zeros([size or 1 for size in spec.shape], spec.dtype), inputs
    )
    weights = [tf.identity(v) for v in model.variables]
    with replaced_weights(model, weights, remedy=remedy):
        model.network(zeros)


def _replace(value: Any, others: dict[Any, Any]) -> Any:
    if isinstance(value, tf.Variable):
        return others.get(value.ref(), value)
    if isinstance(value, (list, tuple)):
        items = [_replace(item, others) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return items if changed else value
    return value


def _check_unread(read: Sequence[Any], others: dict[Any, Any], remedy: str) -> None:
    for variable in read:
        if variable.ref() in others:
            raise InputError(
                f"Expected weight {variable.name} to be an attribute of its layer that "
                f"the layer reads in every call; it is read in another way. {remedy}"
            )
