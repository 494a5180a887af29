"""A model that computes with other weights than its variables, for one example.

Keras 2 has no function of (weights, inputs).  Its layers read their weights as
attributes of theirs, directly or in lists; here these attributes are other tensors for
a while, which may differ between the examples of a vectorised map.

Formal guarantees:
  - In ``replaced_weights`` the model is its function of the weights that are given, or
    an error is raised: a layer that reads a variable in another way is found.
  - Afterwards every attribute is what it was.

Public: which attributes.  Sensitive: the weights, where they depend on an example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from accounting.validation import InputError
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import tf

#: Attributes of a layer that list its weights, and are not what it computes with.
_KERAS_LISTS = ("_trainable_weights", "_non_trainable_weights")
_OTHER_METHOD = "Take another --method."


@contextlib.contextmanager
def replaced_weights(
    model: TrainableModel, weights: Sequence[Any], *, remedy: str = _OTHER_METHOD
) -> Iterator[None]:
    """Lets ``model`` compute with other weights.

    Args:
      model: Called before, or functional.
      weights: A tensor for each of its variables, of its shape.
      remedy: What to do about a model that cannot, for the error.

    Args:
      model: Whose layers hold their weights as attributes.
      weights: Tensors of the shapes of its variables, in order.

    Raises:
      InputError: in the end, if one of its variables was read nevertheless.
    """
    variables = model.variables
    others = {v.ref(): w for v, w in zip(variables, weights, strict=True)}
    saved = []
    try:
        for layer in model.network._flatten_layers():
            # Through __dict__: Keras would track what is assigned.
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
    """Accepts a model whose weights ``replaced_weights`` can replace.

    Args:
      model: Called before, or functional.
      remedy: What to do about one whose weights it cannot, for the error.

    Raises:
      InputError: a layer reads a weight in another way.
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
