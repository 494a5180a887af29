"""Models: the default one for prepared tables (see ``table_model``), and users' own.

A model maps a dict of columns to outputs.  With the default loss it outputs one logit
per example, whose binary cross-entropy with the column ``label`` is minimised; see
``losses`` for others.  Preprocessing is part of the model, so that the exported model
takes raw columns.

With ``--model module:function``, ``function(manifest)`` or ``function()`` returns such
a Keras model.  A subclassed model takes a dict of all columns except ``label``, or the
only one:

    def small(manifest):
        integers = keras.Input((13,), name="integers")
        return keras.Model(integers, keras.layers.Dense(1)(integers))

A model is checked before it is returned: see ``model_check``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column, Manifest
from trainer.core.tf_compat import keras, tf
from trainer.gradients.model_check import check_differentiable, check_model
from trainer.model.layers import as_keras
from trainer.model.losses import (
    BINARY_CROSS_ENTROPY,
    Loss,
    loss_by_name,
    loss_of_ones_own,
)
from trainer.model.metrics import LABEL
from trainer.model.table_model import Table, read_table, table_model
from trainer.model.trainable_model import (
    TrainableModel,
    Views,
    trained_model,
)
from trainer.model.user_code import in_one_line, load_function, one_line_errors
from trainer.settings.train_settings import DEFAULT_MODEL, LOSSES_OF_LABELS

#: What Keras's fit, evaluate and predict call.
_OF_KERAS_LOOPS = (
    "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"
)  # fmt: skip
#: How the names begin that Keras gives to inputs.
_NAMED_BY_KERAS = ("keras_tensor", "input_layer")


def _check_loss(table: Table, loss: Loss) -> None:
    """Refuses a named loss that does not suit the table's label."""
    suiting = LOSSES_OF_LABELS[table.task]
    if loss.ones_own or loss.name in suiting:
        return
    raise InputError(
        f"Expected --loss {suiting[0]} for the {table.task} label of this table, not "
        f"loss={loss.name!r}."
    )


def make_loss(name: str) -> Loss:
    """Returns the loss with a Keras name, or that of ``module:function``.

    Raises:
      InputError: there is no such loss.
    """
    if ":" in name:
        return loss_of_ones_own(name, load_function(name, "loss"))
    return loss_by_name(name)


def make_model(
    manifest: Manifest,
    *,
    model: str = DEFAULT_MODEL,
    embedding_dim: int,
    hidden: Sequence[int],
    loss: Loss = BINARY_CROSS_ENTROPY,
) -> TrainableModel:
    """Returns the model that ``model`` names, checked.

    Args:
      manifest: Manifest of the batches.
      model: "default" or "module:function".
      embedding_dim: Size of the default model's embeddings.
      hidden: Sizes of the default model's hidden layers.
      loss: The loss to minimise.

    Raises:
      InputError: there is no such model, or it does not support private training.
    """
    description: dict[str, Any] = {"name": model, "loss": loss.name}
    if model == DEFAULT_MODEL:
        table = read_table(manifest)
        _check_loss(table, loss)
        network = table_model(table, embedding_dim=embedding_dim, hidden=hidden)
        description |= {"embedding_dim": embedding_dim, "hidden": list(hidden)}
        description["name"] = manifest.dataset["name"]
    else:
        network = _call(model, manifest)
    sizes = [int(np.prod(v.shape)) for v in network.trainable_variables]
    description["num_parameters"] = sum(sizes)
    trainable = TrainableModel(
        network=network,
        description=description,
        loss=loss,
        columns=manifest.columns,
    )
    check_model(trainable, manifest)
    return trainable


def make_trained(
    model: TrainableModel, manifest: Manifest, views: Views
) -> TrainableModel:
    """Returns the model that a step trains: over views, with dropout.

    Args:
      model: A model that ``check_model`` accepted.
      manifest: Manifest of the batches.
      views: Views of an example.

    Raises:
      InputError: as for ``trained_model``, or per-example gradients cannot be computed.
    """
    trained = trained_model(model, views)
    if trained is not model:
        check_differentiable(trained, manifest)
    return trained


def _call(spec: str, manifest: Manifest) -> Any:
    """Returns the model of the user's function, as a functional model."""
    function = load_function(spec)
    if isinstance(function, keras.Model):
        raise InputError(
            f"Expected model={spec!r} to name a function, which makes the model of "
            "each run anew; it names a model. Put what makes it into a function."
        )
    with one_line_errors(f"model={spec!r}"):
        network = function(manifest) if _takes_one(function) else function()
        return as_functional(network, manifest)


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a callable without a signature
        return True
    return True


def as_functional(network: Any, manifest: Manifest) -> Any:
    """Returns a model with named inputs; a subclassed one takes all but ``label``.

    Args:
      network: A Keras model, functional or subclassed, or a ``tf.Module``.
      manifest: Manifest of the batches.

    Raises:
      InputError: the model contains TF Privacy's own clip and noise, or says itself how
        it is trained; or it is not known which columns its inputs or outputs are.
    """
    network = as_keras(network)
    _check_no_training_of_its_own(network)
    if isinstance(network, keras.Sequential) and network.built:
        plain = type(network) is keras.Sequential  # another may have a call of its own
        outputs = network.outputs if plain else network(*network.inputs)
        if plain and len(outputs) == 1:  # not a list: a loss takes the output itself
            (outputs,) = outputs
        network = keras.Model(network.inputs, outputs, name=network.name)
    if not isinstance(getattr(network, "inputs", None), list):
        network = _of_all_columns(network, manifest)
    _name_only_input(network, manifest)
    if isinstance(network.output, list | tuple) and len(network.outputs) > 1:
        raise InputError(
            "Expected several outputs of the model as a dict, by the names of the "
            "columns that they are held against. Give keras.Model(model.inputs, "
            f"dict(zip({network.output_names}, model.outputs)))."
        )
    if not all(layer.built for layer in network._flatten_layers()):
        # Keras builds a layer within a layer when that is first called on tensors.
        specs = tf.nest.map_structure(
            lambda value: tf.TensorSpec(value.shape, value.dtype), network.input
        )
        tf.function(network, autograph=False).get_concrete_function(specs)
    return network


def _check_no_training_of_its_own(network: Any) -> None:
    """Refuses what Keras's own loops call, and no step of a plan does."""
    for name in _OF_KERAS_LOOPS:
        found = getattr(getattr(network, name), "__func__", None)
        if found is not getattr(keras.Model, name):
            raise InputError(
                f"Expected a model that is trained by a loss (labels, outputs); {name} "
                f"of {type(network).__name__} would not be called. Give what it "
                "computes as the loss or a metric, and a model without it."
            )


def _name_only_input(network: Any, manifest: Manifest) -> None:
    """Names an input to which Keras gave a name after the only column."""
    columns = _inputs_of(manifest)
    if len(columns) != 1 or len(network.inputs) != 1:
        return
    (column,), (value,) = columns, network.inputs
    has_key = isinstance(network.input, Mapping)
    if not has_key and value.name.startswith(_NAMED_BY_KERAS):
        value.name = column.name


def _inputs_of(manifest: Manifest) -> list[Column]:
    return [column for column in manifest.columns if column.name != LABEL]


def _of_all_columns(network: Any, manifest: Manifest) -> Any:
    inputs = {
        column.name: keras.Input(column.shape, dtype=column.dtype, name=column.name)
        for column in _inputs_of(manifest)
    }
    if not isinstance(network, keras.Sequential):
        outputs = _called(network, inputs)
        return keras.Model(inputs, outputs, name=network.name)
    if len(inputs) != 1:
        raise InputError(
            "Expected a Sequential model to begin with the column that it takes; the "
            f"batches have {', '.join(inputs)}. Put keras.Input(shape, name=column) "
            "before its layers."
        )
    outputs = network(*inputs.values())
    return keras.Model(inputs, outputs, name=network.name)


def _called(network: Any, inputs: Mapping[str, Any]) -> Any:
    """Returns the outputs for a dict of columns, or for the only column."""
    if len(inputs) != 1:
        return network(inputs)
    [(name, column)] = inputs.items()
    try:
        with warnings.catch_warnings(action="ignore"):  # that it cannot be built so
            return network(inputs)
    except Exception as error:
        of_dict = error
    try:
        return network(column)
    except Exception as error:
        raise InputError(
            f"Expected {network.name} to take column {name!r}, or a dict of it. Of the "
            f"column it raised {in_one_line(error)} Of the dict: {in_one_line(of_dict)}"
        ) from None
