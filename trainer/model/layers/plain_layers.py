"""Runs recurrent layers of Keras as operations that per-example gradients support.

Recurrent layers loop over their time steps, or call a fused kernel.  Neither a
vectorised map nor the proof that rows do not mix (``row_independence``) supports these.
Keras has other code with the same outputs, which this context selects.

Unrolled and backwards, Keras 3.15 sets outputs of masked steps to zero by the mirrored
mask, as in Bidirectional.  A layer that goes backwards is given its sequences so.

Formal guarantees:
  - Outputs, masks and states are the same, up to rounding.
  - Afterwards the layers have their own settings, also after an exception.

Public: everything here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from accounting.core.validation import InputError
from trainer.tf_compat import keras

#: Most time steps of a recurrent layer that are unrolled; more take minutes to compile.
MOST_TIME_STEPS = 512


@contextlib.contextmanager
def plain_layers(network: Any) -> Iterator[list[int]]:
    """Runs the recurrent layers of a Keras model unrolled within a context.

    Yields a list to which each call of a recurrent layer appends its time steps.
    """
    lengths: list[int] = []
    with contextlib.ExitStack() as replaced:
        for layer in _recurrent_layers(network):
            loop = functools.partial(_unrolled, layer, layer.inner_loop, lengths)
            # Through __dict__: Keras tracks attributes that are assigned.
            replaced.enter_context(mock.patch.dict(vars(layer), inner_loop=loop))
        yield lengths


def _recurrent_layers(network: Any) -> list[Any]:
    layers = network._flatten_layers()
    return [layer for layer in layers if isinstance(layer, keras.layers.RNN)]


def _unrolled(
    layer: Any,
    inner_loop: Callable[..., Any],
    lengths: list[int],
    sequences: Any,
    initial_state: Any,
    mask: Any,
    **more: Any,
) -> Any:
    """Calls the loop of a layer, unrolled if the number of time steps is static.

    Args:
      layer: A recurrent layer.
      inner_loop: Its loop.
      lengths: List to which the number of time steps is appended.
      sequences: Inputs, (batch, time, ...).
      initial_state: Where the loop begins.
      mask: Which time steps count, (batch, time); None for all.
      more: Other arguments of the loop.
    """
    steps = sequences.shape[1]
    if steps is not None and steps > MOST_TIME_STEPS:
        raise InputError(
            f"Expected at most {MOST_TIME_STEPS} time steps of a recurrent layer: its "
            f"steps are unrolled for per-example gradients; got {steps}. Shorten the "
            "sequences, for example by a convolution with strides before the layer."
        )
    if steps is not None:
        lengths.append(steps)
    plain = {"unroll": steps is not None, "use_cudnn": False, "go_backwards": False}
    if layer.go_backwards:
        sequences = keras.ops.flip(sequences, 1)
        mask = None if mask is None else keras.ops.flip(mask, 1)
    with mock.patch.dict(vars(layer), plain):
        return inner_loop(sequences, initial_state, mask, **more)
