"""A TensorFlow function and its variables, as a Keras model.

    model = FunctionModel(module, module.trainable_variables)      # a tf.Module
    make_private(model, batches="batches", run="run", ...)

Formal guarantees:
  - The model computes what the function computes, and trains exactly the given
    variables, in place.

Public: everything but columns and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.tf_compat import check_plain, is_of_keras_2, keras, tf


class FunctionModel(keras.Model):
    """A function of columns, and the variables that it is trained by.

    Exported as a SavedModel alone: Keras's format needs the code of Keras's layers.

    Args:
      function: (name -> column (batch, ...)) -> outputs (batch, ...), or a dict of
        them; a ``tf.Module`` that can be called, or a function.
      variables: The ``tf.Variable``s to train, which the function reads.
      name: Name of the model.

    Raises:
      InputError: a variable is not a ``tf.Variable``, or there is none.
    """

    def __init__(
        self,
        function: Callable[[Mapping[str, Any]], Any],
        variables: Sequence[Any],
        *,
        name: str = "function",
    ) -> None:
        super().__init__(name=name)
        if not variables or not all(isinstance(v, tf.Variable) for v in variables):
            raise InputError(
                "Expected a list of tf.Variable, at least one, that the function is "
                f"trained by; got {variables!r}."
            )
        self.function = function
        self.trained = [_adopted(variable) for variable in variables]

    def call(self, columns: Mapping[str, Any]) -> Any:
        """Returns the outputs of the function.

        Args:
          columns: Columns by name, each (batch, ...).
        """
        return self.function(columns)


def as_keras(model: Any) -> Any:
    """Returns what a user gave as a model as a plain Keras model.

    Args:
      model: A Keras model, or a ``tf.Module`` that can be called.

    Raises:
      InputError: it is neither, or a model of Keras 2 or of TF Privacy.
    """
    if isinstance(model, tf.Module) and callable(model) and not is_of_keras_2(model):
        return FunctionModel(model, model.trainable_variables, name=model.name)
    check_plain(model)
    return model


def has_keras_format(network: Any) -> bool:
    """Whether Keras can save a model: no part of it is a TensorFlow function."""
    parts = network._flatten_layers()
    return not any(isinstance(part, FunctionModel) for part in parts)


def _adopted(variable: Any) -> Any:
    """Returns the Keras variable whose value is a ``tf.Variable``."""
    adopted = keras.Variable(
        variable.numpy(),
        dtype=variable.dtype.name,
        trainable=True,
        name=variable.name.partition(":")[0].replace("/", "_"),
    )
    adopted._value = variable
    return adopted
