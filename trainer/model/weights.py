"""Initial weights of a run, and other weights in a model for a while.

Initial weights come from a file, which the user declares public:

    FILE.npz     NumPy arrays in the order of the trainable weights: an iterate that a
                 run kept (weight_0, weight_1, ...), or ``np.savez(file, *arrays)``
    FILE.keras   Keras model with the same trainable weights, such as a run's
                 ``ema_model.keras``

The run record has the digest of the file.  Weights do not show what they were learned
from.  The privacy statement holds only if they do not depend on the training examples,
and says so.  Weights in the folder of a run on the same batches are refused: see
``preflight``.

A network is trained in place: a second run of it in the same process would begin at
the weights of the first, which its epsilon does not cover.  `check` refuses a run that
trains or reads a variable which another run on rows of the same files trains, in
whichever network it is.  It also refuses a variable with a value that some variable had
at the end of an epoch of ``make_private``, such as a copied weight.

Weights of other shapes, weights that are not finite, and files that need a pickle or
unknown code are refused before any step, in one line.  After `weights_of` the variables
have their old values, bit for bit, also after an exception.

Public: everything here, as the user declares, except digests of the rows' files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from pipelines.batches.folder import read_checksums, read_manifest
from pipelines.files.storage import StrPath
from trainer.core.tf_compat import keras, raw_variable

#: Attribute of a variable: what identifies rows -> the run that trains it on them.
_ROWS = "_dpsgd_rows"
#: Attribute of a variable: digest of its value before the first run.
_START = "_dpsgd_start"

#: Digest of a trained value -> what identifies rows -> the run.  Sensitive.
_TRAINED: dict[str, dict[str, Any]] = {}


def start_at(file: str | None, variables: Sequence[Any]) -> dict[str, Any]:
    """Gives variables the weights of a file; returns their entry in the run record.

    Args:
      file: The file; None leaves the variables as they are.
      variables: The trainable ``tf.Variable``s, in order.

    Raises:
      InputError: there is no such file, it has neither of the two formats, shapes
        differ, or values are not finite real numbers.
    """
    if file is None:
        return {}
    data, arrays = _read(pathlib.Path(file))
    if len(arrays) != len(variables):
        raise _unfit(file, f"it has {len(arrays)} of {len(variables)}")
    for variable, array in zip(variables, arrays, strict=True):
        shape = tuple(variable.shape)
        if array.shape != shape:
            what = f"{variable.name} has shape {shape}, that of the file {array.shape}"
            raise _unfit(file, what)
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise _unfit(file, f"{variable.name} is no array of finite numbers")
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array.astype(variable.dtype.as_numpy_dtype))
    digest = hashlib.sha256(data).hexdigest()
    return {"initial_weights": {"sha256": digest, "declared_public": True}}


def _unfit(file: str, what: str) -> InputError:
    return InputError(
        f"Expected initial_weights={file} to be the trainable weights of the "
        f"model, in order: {what}. Give a file of the same model, or omit "
        "--initial-weights."
    )


def _read(path: pathlib.Path) -> tuple[bytes, list[np.ndarray]]:
    try:
        data = path.read_bytes()
        return data, _of_npz(data) if path.suffix == ".npz" else _of_keras(path)
    # Keras raises errors of any class.  The text is public: no example was seen.
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise InputError(
            f"Expected initial_weights={path} to be readable as weights: "
            f"{type(error).__name__}: {text}. Save them by np.savez(file, *arrays)."
        ) from None


def _of_npz(data: bytes) -> list[np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        prefix = "arr_" if "arr_0" in arrays else "weight_"
        return [arrays[f"{prefix}{index}"] for index in range(len(arrays.files))]


def _of_keras(path: pathlib.Path) -> list[np.ndarray]:
    model = keras.models.load_model(path, compile=False)
    return [variable.numpy() for variable in model.trainable_variables]


def check(network: Any, used: Sequence[Any], batches: StrPath, run_id: str) -> None:
    """Refuses weights that another run of this process trained on the same rows.

    Args:
      network: Keras model that a run is to train.
      used: TensorFlow variables of the step, also those of no layer: an augmentation,
        a constraint or an optimizer may read another network.
      batches: Folder of the batches of the run, here or in a store.
      run_id: Random id of the run; empty before it has one.

    Raises:
      InputError: another run has trained one of the variables on the same rows.
    """
    rows = _rows_in(batches)
    trained = [raw_variable(variable) for variable in network.weights]
    for variable in {id(each): each for each in (*trained, *used)}.values():
        of_value = _TRAINED.get(_digest(variable), {}) if _TRAINED else {}
        for others in (_rows_of(variable), of_value):
            if any(others.get(row, run_id) != run_id for row in rows):
                raise InputError(
                    "Expected a network that no other run has trained on rows of the "
                    "same files, and that reads none: this run would use weights of "
                    "theirs, which the stated epsilon does not cover. Build the "
                    "networks anew for each run."
                )


def take(network: Any, batches: StrPath, run_id: str) -> None:
    """Notes that a run trains a network, before its next step.

    Args:
      network: Keras model that ``check`` accepted.
      batches: Folder of the batches of the run, here or in a store.
      run_id: Random id of the run.
    """
    rows = dict.fromkeys(_rows_in(batches), run_id)
    for variable in map(raw_variable, network.weights):
        setattr(variable, _ROWS, {**_rows_of(variable), **rows})
        if not hasattr(variable, _START):
            setattr(variable, _START, _digest(variable))


def _rows_in(batches: StrPath) -> tuple[str, ...]:
    """Returns what names the rows of batches."""
    return (read_manifest(batches).batches_id, *read_checksums(batches).inputs)


def note(network: Any) -> None:
    """Notes the values that runs have given to the weights of a network."""
    # Not those that are trainable now: a step trains what was so when it was compiled.
    weights = (v for v in map(raw_variable, network.weights) if v.dtype.is_floating)
    for variable in weights:
        digest = _digest(variable)
        if digest != getattr(variable, _START, digest):  # else public
            rows = _rows_of(variable)
            _TRAINED[digest] = {**_TRAINED.get(digest, {}), **rows}


def _rows_of(variable: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(variable, _ROWS, {})
    return found


def _digest(variable: Any) -> str:
    return hashlib.sha256(np.asarray(variable.numpy()).tobytes()).hexdigest()


@contextlib.contextmanager
def weights_of(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """Sets variables to ``values`` within a context.

    Args:
      variables: TensorFlow variables.
      values: An array or tensor of the shape of each.
    """
    saved = [variable.numpy() for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        yield
    finally:
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(value)
