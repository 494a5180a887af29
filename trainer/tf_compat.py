"""Imports TensorFlow, Keras 2 and TF Privacy with the settings that they need.

Every module of this package imports ``tf``, ``keras`` and parts of TF Privacy from
here, so that the settings precede the first import.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from accounting.validation import InputError

#: How users set clip norm and noise instead.
NOISE_PLACES = "to make_private, or as --l2-norm-clip and --noise-multiplier"


@contextlib.contextmanager
def _quiet_standard_error() -> Iterator[None]:
    # TensorFlow's native libraries log a dozen lines about CUDA and oneDNN while they
    # load, before any log level is read.  Import errors are Python exceptions, which
    # this does not hide.
    sys.stderr.flush()
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


# TF Privacy 0.9.0 needs Keras 2, which TensorFlow 2.16 and later provide only as the
# package tf-keras, and only if this is set before TensorFlow is imported.
os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# tensorflow_privacy/__init__.py imports estimators, which TensorFlow no longer has,
# unless this attribute is set.
sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]

with _quiet_standard_error():
    import tensorflow as tf
    import tf_keras as keras
    from tensorflow.python.framework.ops import gradient_registry
    from tf_keras.src import backend as keras_backend

    try:
        from tensorflow_privacy.privacy.fast_gradient_clipping import clip_grads
    except ImportError:  # pip installs it only for Python 3.11 and earlier
        clip_grads = None

    tf.config.list_physical_devices()  # logs the rest of those lines

if tf.keras.Model is not keras.Model:
    raise InputError(
        "Expected TensorFlow to use Keras 2. Set TF_USE_LEGACY_KERAS=1 before the "
        "first import of TensorFlow, or import trainer before it."
    )

# Grappler's remapper sometimes fails on a graph ("Node Relu_2 has an empty op name")
# and leaves it unchanged.  Whether kernels are fused would then depend on chance, and
# a resumed run might differ in the last bits.
tf.config.optimizer.set_experimental_options({"remapping": False})

# AutoGraph warns about built-in Python functions whose source it cannot find.
tf.get_logger().setLevel("ERROR")


def is_of_tf_privacy(thing: Any) -> bool:
    """Returns whether a model, layer or optimizer is an object of TF Privacy."""
    modules = [kind.__module__ for kind in type(thing).__mro__]
    return any(name.partition(".")[0] == "tensorflow_privacy" for name in modules)


def check_plain(network: Any) -> None:
    """Refuses a model with TF Privacy's own clip and noise, which would not be used.

    Raises:
      InputError: the model, a part of it or its optimizer is TF Privacy's.
    """
    for part in (*network._flatten_layers(), getattr(network, "optimizer", None)):
        if is_of_tf_privacy(part):
            raise InputError(
                f"Expected a plain tf_keras.Model; {type(part).__name__} of TF Privacy "
                "has its own clip and noise, which would not be used. Make the same "
                "layers a tf_keras.Model or tf_keras.Sequential, and give clip and "
                f"noise {NOISE_PLACES}."
            )


__all__ = [
    "NOISE_PLACES",
    "check_plain",
    "clip_grads",
    "gradient_registry",
    "is_of_tf_privacy",
    "keras",
    "keras_backend",
    "tf",
]
