"""Imports TensorFlow, Keras and TF Privacy with the settings that they need.

The trainer imports them from here, so that the settings precede the first import.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from trainer.core.step.noise import ALIGNMENT

#: How many calls keep standard error quiet, and its descriptor meanwhile.
_quiet: list[int] = []
_quieting = threading.Lock()


@contextlib.contextmanager
def _quiet_standard_error() -> Iterator[None]:
    # Of the process: what native code writes does not pass through Python.  Errors are
    # Python exceptions, which this does not hide.
    with _quieting:
        if not _quiet:
            sys.stderr.flush()
            saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.close(null)
        _quiet.append(_quiet[0] if _quiet else saved)
    try:
        yield
    finally:
        with _quieting:
            saved = _quiet.pop()
            if not _quiet:
                os.dup2(saved, 2)
                os.close(saved)


def redacted_logs() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which TensorFlow logs no value of an example.

    Its native code warns of an id that is out of range, and quotes it.
    """
    return _quiet_standard_error() if LOGS_WARNINGS else contextlib.nullcontext()


# Keras reads its backend when it is first imported.  Whoever imports it before us, or
# sets the variable, has chosen, and is told if that is another.
_REMEDY = "Set KERAS_BACKEND=tensorflow before keras is first imported."
if "keras" not in sys.modules:
    _chosen = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if _chosen != "tensorflow":
        raise InputError(
            f"Expected Keras on TensorFlow; here KERAS_BACKEND={_chosen}. {_REMEDY}"
        )
    os.environ["KERAS_BACKEND"] = _chosen
# The level is read once, as TensorFlow loads.
if "tensorflow" not in sys.modules:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
LOGS_WARNINGS = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") in ("", "0", "1")
# tensorflow_privacy/__init__.py imports estimators, which TensorFlow no longer has,
# unless this attribute is set.
sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]

# Native libraries log a dozen lines about CUDA and oneDNN while they load, before any
# level is read.
with _quiet_standard_error():
    import keras
    import tensorflow as tf
    from keras.src.backend import get_keras_mask, set_keras_mask
    from keras.src.backend.tensorflow import image as keras_image
    from keras.src.backend.tensorflow import random as keras_random
    from keras.src.losses.losses import LossFunctionWrapper
    from keras.src.saving import serialization_lib
    from tensorflow.core.protobuf import saved_model_pb2
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.framework.ops import gradient_registry
    from tensorflow.python.ops import gen_math_ops, gen_nn_ops

    try:
        from tensorflow_privacy.privacy.fast_gradient_clipping import clip_grads
    except ImportError:  # pip installs it only for Python 3.11 and earlier
        clip_grads = None

    tf.config.list_physical_devices()  # logs the rest of those lines

if keras.backend.backend() != "tensorflow":
    raise InputError(
        f"Expected Keras on TensorFlow; here it runs on {keras.backend.backend()}. "
        f"{_REMEDY}"
    )

# Grappler's remapper sometimes fails on a graph ("Node Relu_2 has an empty op name")
# and leaves it unchanged.  Whether kernels are fused would then depend on chance, and
# workers might differ in the last bits.
tf.config.optimizer.set_experimental_options({"remapping": False})

# AutoGraph warns about built-in Python functions whose source it cannot find.
tf.get_logger().setLevel("ERROR")


def raw_variable(variable: Any) -> Any:
    """Returns the ``tf.Variable`` of a variable of Keras or of TensorFlow."""
    return variable.value if isinstance(variable, keras.Variable) else variable


__all__ = [
    "LossFunctionWrapper",
    "clip_grads",
    "gen_math_ops",
    "gen_nn_ops",
    "get_keras_mask",
    "gradient_registry",
    "keras",
    "keras_image",
    "keras_random",
    "pywrap_tfe",
    "raw_variable",
    "redacted_logs",
    "saved_model_pb2",
    "serialization_lib",
    "set_keras_mask",
    "tf",
]


def tensor_of(values: np.ndarray) -> Any:
    """Returns a tensor with the values of an array that must not change any more.

    The tensor shares the memory of the array only if TensorFlow can read the array in
    place, and never writes to it.  (To copy noise takes a third of the time to draw
    it.)
    """
    flags = values.flags
    if values.ctypes.data % ALIGNMENT or not (flags.c_contiguous and flags.writeable):
        return tf.convert_to_tensor(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())


def array_of(value: Any) -> np.ndarray:
    """Returns a read-only array that shares the memory of an eager tensor."""
    return np.asarray(memoryview(value))
