"""Exports the trained model in formats that load without this package.

    RUN/saved_model/   TensorFlow, in any of its languages and servers:
                       ``tf.saved_model.load(p).signatures["serving_default"](**columns)``
    RUN/model.keras    Keras: ``keras.models.load_model(p)(columns)``
    RUN/serving.json   names, types and shapes of columns and predictions; digests

Neither model needs code of this package, if its layers are Keras's.  Both take raw
columns and return, by the task of the loss, ``probability`` of label 1, (batch, 1) or
of the shape of several labels; ``probabilities`` of all classes, (batch, ..., classes);
or the outputs of the network, under their names or as ``prediction``.  A SavedModel
also has ``signatures["outputs"]``, the outputs of the network before any sigmoid or
softmax, and ``weights``, its trainable variables in the order of a run's kept iterates.
`check_export` refuses, before the training, a model that cannot be exported.

The files hold the weights, but no other state of the training, and no name that tells
what was computed.  TensorFlow names functions, and what they capture, by a counter of
the process, which every eager tensor advances: in the files of a trained model it told
how many physical batches the training had, hence how many rows Poisson sampling drew.
Keras names what layers share by its address, and a traced function lists its variables
in the order of their addresses, which depend on what the process computed before.
Therefore, what is traced in `own_numbers` has numbers that depend only on what was
traced in it before, and what Keras saves in it has numbers of its own.  After
`in_order` a function lists its variables in the order of its reads.  A SavedModel with
a function that was traced elsewhere is refused.  What the user saves without this
package, such as by ``network.export``, is not covered.

Public: the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import secrets
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from trainer.core.tf_compat import (
    keras,
    pywrap_tfe,
    saved_model_pb2,
    serialization_lib,
    tf,
)
from trainer.model.layers import has_keras_format
from trainer.model.losses import PROBABILITIES as TAKES_PROBABILITIES
from trainer.model.losses import Loss
from trainer.model.metrics import BINARY, CLASSES
from trainer.model.trainable_model import TrainableModel, named_inputs, nested_inputs
from trainer.report import run_files
from trainer.report.run_files import (
    PREDICTION,
    PROBABILITIES,
    PROBABILITY,
    SERVING_NAME,
    Serving,
    exported_names,
)

#: Names of the two signatures of a SavedModel.
SERVING_SIGNATURE = "serve"  # Keras's name, and the first, hence the default
OUTPUTS_SIGNATURE = "outputs"


def predicting_model(model: TrainableModel, manifest: Manifest) -> Any:
    """Returns the Keras model from named columns to predictions.

    Args:
      model: Model with the weights to export.
      manifest: Manifest with the columns of the network's inputs.
    """
    columns = {column.name: column for column in manifest.columns}
    inputs = {
        name: keras.Input(columns[name].shape, dtype=columns[name].dtype, name=name)
        for name in model.input_names
    }
    taken = named_inputs(model.network)
    given = {name: _of_rank(value, taken[name]) for name, value in inputs.items()}
    outputs = _predictions(model.network(model.inputs(given)), model.loss)
    return keras.Model(inputs, outputs, name=model.network.name)


def _of_rank(value: Any, taken: Any) -> Any:
    """Returns one number a row as the axis of one that Keras makes of it in calls."""
    is_flat = len(value.shape) == len(taken.shape) - 1 and taken.shape[-1] == 1
    return keras.layers.Reshape((*value.shape[1:], 1))(value) if is_flat else value


def _predictions(outputs: Any, loss: Loss) -> Any:
    # Under a loss on probabilities, the network outputs probabilities.
    logits = loss.takes != TAKES_PROBABILITIES
    if loss.task == BINARY:
        if math.prod(outputs.shape[1:]) == 1:
            outputs = keras.layers.Reshape((1,))(outputs)
        activation = "sigmoid" if logits else "linear"
        return keras.layers.Activation(activation, name=PROBABILITY)(outputs)
    if loss.task == CLASSES and logits:
        # The layer Softmax would take the mask of positions as one of classes.
        return keras.layers.Activation("softmax", name=PROBABILITIES)(outputs)
    if isinstance(outputs, Mapping):
        return dict(outputs)
    name = PROBABILITIES if loss.task == CLASSES else PREDICTION
    return keras.layers.Activation("linear", name=name)(outputs)


def export(
    model: TrainableModel,
    manifest: Manifest,
    run: pathlib.Path,
    *,
    average: str | None = None,
) -> None:
    """Writes both formats and their signature.

    Args:
      model: Model with the weights to export.
      manifest: Manifest with the columns of the network's inputs.
      run: Folder of the run.
      average: Name of the average that the weights are; None for the last iterate.
    """
    network = predicting_model(model, manifest)
    keras_name, tensorflow_name = exported_names(average)
    if has_keras_format(network):
        with own_numbers():
            _appear(run / keras_name, network.save)
    _appear(
        run / tensorflow_name,
        lambda path: _save_tensorflow(network, model.network, path),
    )
    signature = serving_of(network, manifest, model.loss.task)
    others = (
        run_files.read_serving(run).digests if (run / SERVING_NAME).exists() else {}
    )
    digest = run_files.digest_of_folder(run / tensorflow_name)
    digests = {**others, tensorflow_name: digest}
    run_files.write_serving(run, dataclasses.replace(signature, digests=digests))


def serving_of(network: Any, manifest: Manifest, task: str) -> Serving:
    """Returns the signature of a predicting model.

    Args:
      network: Model from ``predicting_model``.
      manifest: Manifest with the columns of its inputs.
      task: Task of its loss.
    """
    columns = {column.name: column for column in manifest.columns}
    return Serving(
        inputs=tuple(columns[name] for name in network.input),
        outputs=tuple(_named(network.output, network.output_names[0])),
        task=task,
    )


def check_export(model: TrainableModel, manifest: Manifest) -> None:
    """Checks that a model can be exported, by a trial in a temporary folder.

    Only for a model that has seen no example: the message quotes the error.

    Args:
      model: The model, before its first step.
      manifest: Manifest with the columns of the network's inputs.

    Raises:
      InputError: Keras or TensorFlow cannot save it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="dpsgd-") as folder:
            export(model, manifest, pathlib.Path(folder))
    except OSError as error:
        raise InputError(
            f"Expected room to try the export in {tempfile.gettempdir()}: {error}. Set "
            "TMPDIR to a folder with more."
        ) from None
    except Exception as error:
        text = textwrap.shorten(str(error), 250)
        raise InputError(
            "Expected a model that can be exported once it is trained; saving it "
            f"raised {type(error).__name__}: {text} Give your own layers a get_config, "
            "and what they use as attributes."
        ) from None


def save_tensorflow(model: TrainableModel, manifest: Manifest, path: str) -> None:
    """Writes only the SavedModel.

    Args:
      model: Model with the weights to export.
      manifest: Manifest with the columns of the network's inputs.
      path: New folder of the SavedModel.
    """
    network = predicting_model(model, manifest)
    _appear(
        pathlib.Path(path), lambda new: _save_tensorflow(network, model.network, new)
    )


def _save_tensorflow(network: Any, inner: Any, path: str) -> None:
    """Writes the predicting model of the network ``inner`` as a SavedModel."""
    archive = keras.export.ExportArchive()
    archive.track(network)
    specs = [_specs(network.input)]
    with own_numbers():
        for endpoint, model, name in (
            (SERVING_SIGNATURE, network, network.output_names[0]),
            (OUTPUTS_SIGNATURE, inner, OUTPUTS_SIGNATURE),
        ):
            give = _function_of_columns(model, name)
            traced = archive.add_endpoint(endpoint, give, input_signature=specs)
            in_order(traced.get_concrete_function())
        archive.add_variable_collection("weights", network.trainable_variables)
        archive.write_out(path, verbose=False)
    check_numbers(pathlib.Path(path))


def _specs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tf.TensorSpec(tensor.shape, tensor.dtype, name=key)
        for key, tensor in inputs.items()
    }


def _function_of_columns(network: Any, name: str) -> Callable[[Any], dict[str, Any]]:
    """Returns a function of the network's outputs by name; a single one is ``name``."""

    def give(columns: Mapping[str, Any]) -> dict[str, Any]:
        return _named(network(nested_inputs(network, columns)), name)

    return give


def _named(outputs: Any, name: str) -> dict[str, Any]:
    return dict(outputs) if isinstance(outputs, Mapping) else {name: outputs}


def _appear(path: pathlib.Path, save: Callable[[str], object]) -> None:
    """Saves under a temporary name and renames: ``path`` is complete or absent."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
    try:
        save(os.fspath(temporary))
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


#: No process counts so far, so that no other function has one of these names.
_FIRST = 10**15
_NUMBERS = itertools.count(_FIRST)


@contextlib.contextmanager
def own_numbers() -> Iterator[None]:
    """Takes the numbers in names from a counter of exports, not of the process."""
    counter = pywrap_tfe.TFE_Py_UID
    pywrap_tfe.TFE_Py_UID = lambda: next(_NUMBERS)
    serialization_lib.id = _numbers()
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_UID = counter
        vars(serialization_lib).pop("id", None)


def _numbers() -> Callable[[Any], int]:
    """Returns what stands in for ``id``: the number of an object among those it saw."""
    # They are kept: else another object could have the address of one.
    seen: dict[int, tuple[int, Any]] = {}
    return lambda one: seen.setdefault(id(one), (len(seen), one))[0]


def in_order(function: Any) -> None:
    """Lets a traced function list its variables in the order in which it reads them.

    Args:
      function: A ``ConcreteFunction``.

    Raises:
      InputError: the function watches a variable that it does not read.
    """
    graph = function.graph
    places = {id(handle): place for place, (handle, _) in enumerate(graph.captures)}
    for one in graph.variables:
        if id(one.handle) not in places:
            raise InputError(
                "Expected the network that is exported to read the variables that it "
                f"watches; it does not read {one.name}. Omit what watches it."
            )
    graph.variables = sorted(graph.variables, key=lambda one: places[id(one.handle)])


def check_numbers(saved_model: pathlib.Path) -> None:
    """Checks the names of the functions in a SavedModel.

    Args:
      saved_model: Folder of the SavedModel.

    Raises:
      InputError: a name tells what the process computed.
    """
    found = saved_model_pb2.SavedModel()
    found.ParseFromString((saved_model / "saved_model.pb").read_bytes())
    ends = [
        function.signature.name.rpartition("_")[2]
        for graph in found.meta_graphs
        for function in graph.graph_def.library.function
    ]
    numbers = [int(end) for end in ends if end.isdigit()]
    if min(numbers, default=0) < _FIRST:
        raise InputError(
            "Expected a network without tf.functions that were traced before its "
            "export: their names tell what was computed. Omit tf.function in layers."
        )
