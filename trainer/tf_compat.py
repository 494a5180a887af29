"""TensorFlow and Keras as all modules outside of the core import them.

The core's ``tf_compat`` loads them first, with the settings that they need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accounting.core.validation import InputError
from trainer.core.tf_compat import (
    LossFunctionWrapper,
    get_keras_mask,
    gradient_registry,
    keras,
    keras_image,
    keras_random,
    pywrap_tfe,
    raw_variable,
    saved_model_pb2,
    serialization_lib,
    set_keras_mask,
    tf,
    withheld_logs,
)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raises errors of layers as they are; Keras adds lines and arguments to them."""
    was_filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if was_filtering:
            keras.config.enable_traceback_filtering()


def is_of_keras_2(thing: Any) -> bool:
    """Whether an object is of the package tf_keras."""
    return any(kind.__module__.startswith("tf_keras") for kind in type(thing).__mro__)


def check_plain(network: Any) -> None:
    """Refuses models of Keras 2, and TF Privacy's, whose noise would not be used.

    Args:
      network: What a user gave as a model.

    Raises:
      InputError: it is no plain Keras model.
    """
    if not isinstance(network, keras.Model):
        kind, old = type(network), is_of_keras_2(network)
        raise InputError(
            "Expected a model of Keras 3, not of tf_keras. Build it with `import "
            "keras`, or with tf.keras and without TF_USE_LEGACY_KERAS."
            if old
            else f"Expected a keras.Model, not {kind.__module__}.{kind.__qualname__}."
        )
    for part in network._flatten_layers():
        modules = {kind.__module__.partition(".")[0] for kind in type(part).__mro__}
        if "tensorflow_privacy" in modules:
            raise InputError(
                f"Expected a plain keras.Model; {type(part).__name__} of TF Privacy "
                "has its own clip and noise, which would not be used. Make the same "
                "layers a keras.Model or keras.Sequential, and give clip and noise "
                "to make_private, or as --l2-norm-clip and --noise-multiplier."
            )


__all__ = [
    "LossFunctionWrapper",
    "check_plain",
    "get_keras_mask",
    "gradient_registry",
    "is_of_keras_2",
    "keras",
    "keras_image",
    "keras_random",
    "plain_errors",
    "pywrap_tfe",
    "raw_variable",
    "saved_model_pb2",
    "serialization_lib",
    "set_keras_mask",
    "tf",
    "withheld_logs",
]
