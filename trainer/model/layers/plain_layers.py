"""Runs Keras layers as operations that per-example gradients support.

LSTM and GRU choose between kernels within a function, recurrent layers loop, and
LayerNormalization reshapes the batch for a fused kernel.  Neither a vectorised map nor
the proof that rows do not mix (``row_independence``) supports these.  Keras has other
code with the same outputs, which this context selects.

Formal guarantees:
  - Outputs, masks and states are the same, up to rounding.
  - Afterwards the layers have their own settings, also after an exception.

Public: everything here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from accounting.validation import InputError
from trainer.tf_compat import keras, keras_backend, tf

#: Most time steps of a recurrent layer that are unrolled; more take minutes to compile.
MOST_TIME_STEPS = 512

#: Held within the context: Keras's function is one for all threads.
_LOCK = threading.RLock()


@contextlib.contextmanager
def plain_layers(network: Any) -> Iterator[list[int]]:
    """Runs the layers of a Keras model as plain operations within a context.

    Yields a list to which each call of a recurrent layer appends its time steps.
    """
    with _LOCK:
        yield from _plainly(network)


def _plainly(network: Any) -> Iterator[list[int]]:
    saved = [
        (layer, name, getattr(layer, name))
        for layer in network._flatten_layers()
        for name in _fused_kernels(layer)
    ]
    rnn, lengths = keras_backend.rnn, list[int]()
    try:
        for layer, name, _ in saved:
            vars(layer)[name] = False
        keras_backend.rnn = functools.partial(_unrolled, rnn, lengths)
        yield lengths
    finally:
        keras_backend.rnn = rnn
        for layer, name, value in saved:
            vars(layer)[name] = value


def has_recurrent_layers(network: Any) -> bool:
    """Whether a model has recurrent layers."""
    return any(
        isinstance(layer, keras.layers.RNN) for layer in network._flatten_layers()
    )


def _fused_kernels(layer: Any) -> list[str]:
    """Returns the names of the attributes that select a fused kernel."""
    if isinstance(layer, keras.layers.LayerNormalization):
        return ["_fused"] if hasattr(layer, "_fused") else []
    return [name for name in ("_could_use_gpu_kernel",) if hasattr(layer, name)]


def _unrolled(
    rnn: Any,
    lengths: list[int],
    step_function: Any,
    inputs: Any,
    initial_states: Any,
    **more: Any,
) -> Any:
    """Calls Keras's ``rnn``, unrolled if the number of time steps is static.

    Args:
      rnn: Keras's function.
      lengths: List to which the number of time steps is appended.
      step_function: Argument of ``rnn``: one step of the cell.
      inputs: Argument of ``rnn``: nested tensors (batch, time, ...).
      initial_states: Argument of ``rnn``: first states of the cell.
      more: Keyword arguments of ``rnn``.
    """
    time_axis = 0 if more.get("time_major") else 1
    steps = tf.nest.flatten(inputs)[0].shape[time_axis]
    if steps is not None and steps > MOST_TIME_STEPS:
        raise InputError(
            f"Expected at most {MOST_TIME_STEPS} time steps of a recurrent layer: its "
            f"steps are unrolled for per-example gradients; got {steps}. Shorten the "
            "sequences, for example by a convolution with strides before the layer."
        )
    if steps and not isinstance(more.get("input_length"), tf.Tensor):
        lengths.append(steps)
        more["unroll"] = True
    return rnn(step_function, inputs, initial_states, **more)
