"""Checks that the loss of each example depends on this example alone.

Privacy does not rest on this check.  Gradients of many rows are computed at once only
if the traced graph proves that rows do not mix (``row_independence``), and otherwise
one row at a time.  The check finds models that *intend* to mix rows, whose training
would differ from what their author expects.

The check computes a batch of made-up rows of zeros and ones twice, at random weights.
Without that proof it also computes some of the rows alone.  `check_model` refuses a
model and its loss

  - if an output or loss of a row differs when the row is computed alone, by more than
    0.2 % of the largest value, plus 1e-5;
  - if outputs differ between training and inference, or between two passes over the
    same rows, as with random numbers or statistics of the batch.  (Dropout is switched
    off for the comparison, since a step draws its masks for each row);
  - if the loss is more than a function of columns and weights (see ``pure_graph``), or
    layers add losses or regularisers, learned from data (``adapt``), or have another
    precision than float32;
  - if no made-up row has a finite gradient.

Afterwards the weights have their old values.

Public: everything here; the rows of the probe are made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from trainer.core.tf_compat import keras, raw_variable, tf
from trainer.gradients import proof
from trainer.gradients.paths import (
    ONE_PASS,
    choose_path,
    clipped_sum,
    example_gradients,
)
from trainer.model.losses import check_range, check_shapes
from trainer.model.trainable_model import TrainableModel, named_inputs
from trainer.model.user_code import one_line_errors
from trainer.model.weights import weights_of

#: Layers whose output for one example depends on the others, while they are trained.
_MIXING = ("BatchNormalization", "SyncBatchNormalization")

#: Number of rows of the probe, and of those that are also computed alone.
_NUM_ROWS, _ROWS_ALONE = 16, 8

#: Tolerance for rounding, relative to a value and to the largest one.
_TOLERANCE = 1e-3

_CHANGES_STATE = "Expected a forward pass to change no variable of the model."
_DIFFERS = (
    "Expected the model and its loss to give the same for the same examples twice, and "
    "in training as in inference. Remove what draws random numbers or keeps state."
)

#: Outputs and losses of the rows of a batch.
_Results = list[np.ndarray]


def check_model(model: TrainableModel, manifest: Manifest) -> None:
    """Checks that the loss of each example depends on this example alone.

    Args:
      model: Network and its loss.
      manifest: Manifest of the batches.

    Raises:
      InputError: the model mixes examples, draws random numbers or changes state; or
        shape or range of its outputs do not suit the loss.
    """
    check_inputs(model, manifest)
    _check_outside_of_strategies(model.network)
    _check_layers(model.network)
    # Before any code of the model runs on numbers:
    proof.check_function(model)
    _check_examples(model)
    with one_line_errors(f"the model with loss={model.loss.name!r}"):
        rows = _made_up_rows(model, manifest)
        _check_behaviour(model, rows)
        tensors = _tensors(rows)
        check_range(model.loss, lambda: model.outputs(tensors), model.variables)
    check_differentiable(model, manifest)


def _check_examples(model: TrainableModel) -> None:
    """Refuses a graph of one example that no step may compute."""
    if choose_path(model) != ONE_PASS:
        try:
            example_gradients(model)
        except InputError:
            raise
        except Exception:
            return  # check_differentiable says which, after what explains it


def check_inputs(model: TrainableModel, manifest: Manifest) -> None:
    """Checks that the columns of batches are what the model takes.

    Args:
      model: Network; the loss is not looked at.
      manifest: Manifest of the batches.

    Raises:
      InputError: a column is missing, or has another shape.
    """
    shapes = {column.name: column.shape for column in manifest.columns}
    names, network = set(shapes), model.network
    labels = set(model.label_names)
    for name in model.label_names:
        if name not in names:
            raise InputError(
                f"Expected a column {name!r} among the batches' columns, to hold the "
                f"model's output against: {', '.join(sorted(names))}. Rename the one "
                "that does."
            )
    for name, value in named_inputs(network).items():
        if name not in names or name in labels:
            raise InputError(
                f"Expected input {name!r} of the model to be a column of the batches: "
                f"{', '.join(sorted(names - labels))}. Give keras.Input(..., name=...),"
                " or the key in a dict of inputs, the name of its column."
            )
        if value.dtype == "string":
            raise InputError(
                f"Expected input {name!r} of the model to take numbers, as batches "
                "have; it takes strings. Give the column to `dpsgd prepare` as "
                "categories, whose ids it writes, and the model an input of int32."
            )
        wanted, found = tuple(value.shape[1:]), shapes[name]
        if len(wanted) == len(found) and any(
            w not in (None, f) for w, f in zip(wanted, found, strict=True)
        ):
            raise InputError(
                f"Expected input {name!r} of the model to have the shape of its "
                f"column, {found}; it has {wanted}."
            )
    if not model.variables:
        raise InputError("Expected the model to have trainable variables.")


def _check_outside_of_strategies(network: Any) -> None:
    mirrored = (tf.distribute.DistributedValues,)
    if tf.distribute.has_strategy() or any(
        isinstance(raw_variable(variable), mirrored) for variable in network.variables
    ):
        raise InputError(
            "Expected a model outside of the strategies of tf.distribute, which know "
            "no gradients of single examples. Build and compile it without "
            "strategy.scope(); `mpiexec -n 2 dpsgd train` shares the steps."
        )


def _check_layers(network: Any) -> None:
    for layer in network._flatten_layers():
        if _has_room_to_adapt(layer):
            raise InputError(
                f"Expected {layer.name}, a {type(layer).__name__}, to be built with "
                "constants; adapt learns them from data, without privacy. Give public "
                "ones as arguments: mean and variance, vocabulary, or bin_boundaries."
            )
        _check_precision(layer)


def _check_precision(layer: Any) -> None:
    """Refuses layers that do not compute in float32, as all of the step does."""
    found = {layer.compute_dtype, layer.variable_dtype}
    other = sorted(found & {"float16", "bfloat16", "float64"})
    if other and not isinstance(layer, keras.layers.InputLayer):
        raise InputError(
            f"Expected layers of float32, in which gradients are clipped; {layer.name} "
            f"is of {other[0]}. Remove its dtype, and what sets another dtype policy."
        )


def _has_room_to_adapt(layer: Any) -> bool:
    """Returns whether a layer holds what ``adapt`` learned, or has room for it."""
    if isinstance(layer, keras.layers.Discretization):
        return layer.summary is not None
    has_vocabulary = getattr(layer, "_has_input_vocabulary", True)
    return getattr(layer, "input_mean", 0) is None or not has_vocabulary


def _check_losses(network: Any) -> None:
    """Refuses losses that layers added while they were called, and regularisers."""
    if network.losses:
        raise InputError(
            "Expected no regularisation losses in the model. Remove regularisers and "
            "add_loss; they are not part of the clipped gradient."
        )


def _mixing_layer(network: Any) -> str | None:
    """Returns the message that names a layer which mixes examples; None without any."""
    for layer in network._flatten_layers():
        kind = type(layer).__name__
        if layer.trainable and {x.__name__ for x in type(layer).__mro__} & set(_MIXING):
            return (
                f"Expected no layer that mixes examples; {layer.name} is a {kind}. Use "
                "LayerNormalization or GroupNormalization, or trainable=False for "
                "stored statistics."
            )
    return None


def _random_weights(model: TrainableModel) -> list[np.ndarray]:
    """Returns random weights: a last layer of zeros would hide what others do."""
    random = np.random.default_rng(0)
    return [
        random.normal(0, 0.3, variable.shape).astype(variable.dtype.as_numpy_dtype)
        for variable in model.variables
    ]


def _made_up_rows(model: TrainableModel, manifest: Manifest) -> dict[str, np.ndarray]:
    """Returns columns of zeros and ones, valid as ids and as numbers; all labels."""
    random, rows = np.random.default_rng(0), {}
    for column in manifest.columns:
        values = random.integers(0, 2, (_NUM_ROWS, *column.shape))
        if column.name in model.label_names:
            # Both labels, whatever else is drawn: a loss may ignore rows of label 0.
            values[:] = np.arange(_NUM_ROWS).reshape(-1, *[1] * len(column.shape)) % 2
        rows[column.name] = values.astype(column.dtype)
    return rows


def _tensors(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: tf.constant(value) for name, value in columns.items()}


def _check_behaviour(model: TrainableModel, rows: Mapping[str, np.ndarray]) -> None:
    state = model.network.non_trainable_variables
    before = [v.numpy() for v in state]
    with weights_of(state, before), weights_of(model.variables, _random_weights(model)):
        first = _behaviour(model, rows)
        # First of all: with statistics of NaN, nothing differs any more.
        if not all(map(np.array_equal, before, [v.numpy() for v in state])):
            raise InputError(_mixing_layer(model.network) or _CHANGES_STATE)
        for training in (True, False):
            again = _behaviour(model, rows, training=training)
            if not all(map(_same, first, again)):
                raise InputError(_mixing_layer(model.network) or _DIFFERS)
            _check_losses(model.network)
        alone = [
            {name: value[[row]] for name, value in rows.items()}
            for row in range(_ROWS_ALONE)
        ]
        if choose_path(model) != ONE_PASS:  # which is chosen if rows cannot mix
            _check_rows_apart(model, first, alone)
        _check_finite(model, alone)


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left, right, equal_nan=True)


def _check_rows_apart(
    model: TrainableModel, first: _Results, alone: Sequence[Mapping[str, np.ndarray]]
) -> None:
    behaviours = [_behaviour(model, columns) for columns in alone]
    for value, *ones in zip(first, *behaviours, strict=True):
        found = np.concatenate(ones)
        size = np.abs(found[np.isfinite(found)]).max(initial=0.0)
        here, atol = value[: len(alone)], _TOLERANCE * (size + 1e-2)
        if not np.allclose(here, found, _TOLERANCE, atol, equal_nan=True):
            raise InputError(
                "Expected the output and the loss of one example not to depend on the "
                "others. Remove what mixes examples, such as a mean over the batch."
            )


def _check_finite(
    model: TrainableModel, alone: Sequence[Mapping[str, np.ndarray]]
) -> None:
    for columns in alone:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model.losses(_tensors(columns)))
        found = [
            tf.convert_to_tensor(one)
            for one in tape.gradient(loss, model.variables)
            if one is not None
        ]
        if all(np.isfinite(one).all() for one in found):
            return
    raise InputError(
        "Expected a finite gradient of the model for examples of zeros and ones; "
        f"{len(alone)} of {len(alone)} have none, and would contribute nothing. Keep "
        "its inputs from 0 where it divides, or takes a root or a logarithm."
    )


def _behaviour(
    model: TrainableModel, columns: Mapping[str, np.ndarray], *, training: bool = True
) -> _Results:
    """Returns outputs and losses of some rows, after checking their shapes."""
    rows = _tensors(columns)
    num_rows = len(next(iter(columns.values())))
    outputs = model.outputs(rows, training=training)
    found = tf.nest.flatten(outputs)
    if any(value.shape[:1] != (num_rows,) for value in found):
        raise InputError("Expected the model to give one output per example.")
    if not model.loss.ones_own:
        check_shapes(model.loss, model.labels(rows), outputs)
    of_rows = model.losses(rows, outputs)
    if tuple(of_rows.shape) != (num_rows,):
        raise InputError(
            f"Expected loss={model.loss.name!r} to give one number per example: shape "
            f"(batch,), not {tuple(of_rows.shape)} for a batch of {num_rows}."
        )
    return [np.asarray(value) for value in (*found, of_rows)]


def check_differentiable(model: TrainableModel, manifest: Manifest) -> None:
    """Checks that gradients of single examples can be computed, where they must be.

    A step of the model computes them by the graph that is made here.

    Args:
      model: Network and its loss.
      manifest: Manifest of the batches, which says how many rows are computed at once.

    Raises:
      InputError: gradients of single examples cannot be computed.
    """
    if choose_path(model) == ONE_PASS:
        return
    num_rows = manifest.physical_batch_size
    columns = {
        name: tf.TensorSpec((num_rows, *spec.shape[1:]), spec.dtype)
        for name, spec in model.column_specs.items()
    }
    try:
        function = tf.function(clipped_sum(model, l2_norm_clip=1.0), autograph=False)
        function.get_concrete_function(columns, tf.TensorSpec((num_rows,)))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            "Expected a model whose gradient can be computed one example at a time; "
            f"that raised {type(error).__name__}. Use operations that need no such "
            f"map: {proof.obstacle(model)}."
        ) from None
