"""Keras layers as operations whose gradients can be taken for each example.

LSTM and GRU choose between kernels in a function of their own, recurrent layers loop,
and LayerNormalization reshapes the batch for a fused kernel: neither a vectorised map
nor the proof that rows are apart takes these.  Keras has other code for the same
outputs, which is chosen here for a while.

Formal guarantees:
  - Outputs are the same, up to rounding, and so are masks and states.
  - Afterwards the layers are what they were, also after an exception.

Public: everything here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from accounting.validation import InputError
from trainer.tf_compat import keras, keras_backend, tf

#: Steps of a recurrent layer that are unrolled; more take minutes to compile.
MOST_TIME_STEPS = 512


@contextlib.contextmanager
def plain_layers(network: Any) -> Iterator[list[int]]:
    """Lets the layers of a Keras model run as plain operations.

    Yields the numbers of time steps of recurrent layers, as they are called.
    """
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
    """Whether a model has layers that take one step after the other."""
    return any(
        isinstance(layer, keras.layers.RNN) for layer in network._flatten_layers()
    )


def _fused_kernels(layer: Any) -> list[str]:
    """Returns the attributes that choose a kernel of its own."""
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
    """Returns what Keras's ``rnn`` gives, without a loop where the length is known.

    Args:
      rnn: Keras's.
      lengths: Gets the number of time steps.
      step_function: As ``rnn`` takes it, like all after it.
      inputs: (batch, time, ...), nested.
      initial_states: Initial states of the cell.
      more: By name, as Keras's layers give it.
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
