"""Layers as per-example gradients need them: functions, recurrent and random layers.

`FunctionModel` is a Keras model of a TensorFlow function and its variables, which it
trains in place:

    model = FunctionModel(module, module.trainable_variables)      # a tf.Module
    make_private(model, batches="batches", run="run", ...)

Keras's recurrent layers loop over their time steps, or call a fused kernel.  Neither a
vectorised map nor the proof that rows do not mix (``row_independence``) supports these.
Within `plain_layers` Keras runs other code, whose outputs, masks and states are the
same up to rounding.  Layers that go backwards are given reversed sequences instead,
since Keras 3.15 mirrors the mask when it unrolls them.

Keras's random numbers are functions of a seed, which a layer's generator counts up.
Two contexts replace these seeds while a network is traced: within `keyed_layers` the
dropout mask of a row follows from the row's own seed, and within `still_layers` dropout
drops nothing.  Seeds are secret, and independent for every row of every step
(``noise.row_seeds``).  A mask is a function of the row's seed, of the index of the
dropout in the forward pass, and of the shape of one row: a second pass has the same
mask, whatever the other rows are.  Two words of the seed are mixed by the finalizer of
MurmurHash3, whose statistics suffice: privacy requires only that a row's mask is a
function of its own seed, and that seeds of different rows are independent and
identically distributed.  A unit is dropped with the rate of the layer, up to 2^-32.  A
layer that draws anything but dropout masks is refused.

At its end, also by an exception, each context restores the layers and Keras.

Public: layers and rates.  Sensitive: columns, outputs, seeds and masks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from accounting.core.validation import InputError
from trainer.core.tf_compat import keras, keras_image, keras_random, tf


class FunctionModel(keras.Model):
    """A function of columns, and the variables that it is trained by.

    Exported as a SavedModel alone: Keras's format needs the code of Keras's layers.

    Args:
      function: (name -> column (batch, ...)) -> outputs (batch, ...), or a dict of
        them; a ``tf.Module`` that can be called, or a function.
      variables: The ``tf.Variable``s to train, which the function reads.
      name: Name of the model.

    Raises:
      InputError: a variable is not a ``tf.Variable``, or there is none.

    Example:
      >>> weights = tf.Variable(tf.zeros((8, 1)))
      >>> model = FunctionModel(lambda columns: columns["x"] @ weights, [weights])
      >>> model({"x": tf.ones((2, 8))}).shape
      TensorShape([2, 1])
    """

    def __init__(
        self,
        function: Callable[[Mapping[str, Any]], Any],
        variables: Sequence[Any],
        *,
        name: str = "function",
    ) -> None:
        super().__init__(name=name)
        if not variables or not all(isinstance(v, tf.Variable) for v in variables):
            raise InputError(
                "Expected a list of tf.Variable, at least one, that the function is "
                f"trained by; got {variables!r}."
            )
        self.function = function
        self.trained = [_adopted(variable) for variable in variables]

    def call(self, columns: Mapping[str, Any]) -> Any:
        """Returns the outputs of the function.

        Args:
          columns: Columns by name, each (batch, ...).
        """
        return self.function(columns)


def as_keras(model: Any) -> Any:
    """Returns what a user gave as a model as a plain Keras model.

    Args:
      model: A Keras model, or a ``tf.Module`` that can be called.

    Raises:
      InputError: the model is neither, as one of Keras 2.
    """
    of_keras = isinstance(model, keras.Model) or hasattr(model, "compile")
    if isinstance(model, tf.Module) and callable(model) and not of_keras:
        return FunctionModel(model, model.trainable_variables, name=model.name)
    if not isinstance(model, keras.Model):
        kind = type(model)
        raise InputError(
            f"Expected a keras.Model of Keras 3, not {kind.__module__}."
            f"{kind.__qualname__}."
        )
    return model


def has_keras_format(network: Any) -> bool:
    """Whether Keras can save a model: no part of it is a TensorFlow function."""
    parts = network._flatten_layers()
    return not any(isinstance(part, FunctionModel) for part in parts)


def _adopted(variable: Any) -> Any:
    """Returns the Keras variable whose value is a ``tf.Variable``."""
    adopted = keras.Variable(
        variable.numpy(),
        dtype=variable.dtype.name,
        trainable=True,
        name=variable.name.partition(":")[0].replace("/", "_"),
    )
    adopted._value = variable
    return adopted


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
      inner_loop: Loop of the layer.
      lengths: List to which the number of time steps is appended.
      sequences: Inputs, (batch, time, ...).
      initial_state: State before the first time step.
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


#: Words of a seed: the first two for augmentation, the others for masks.
SEED_WORDS = 4

#: Attributes of Keras's layers with a generator that are 0 if they draw nothing.
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")

_GOLDEN = 0x9E3779B1

#: Held within a context: Keras's functions are one for all threads.
_LOCK = threading.RLock()

#: (inputs, rate, noise_shape) -> inputs after dropout.
_Dropout = Callable[[Any, float, Any], Any]


def is_random(layer: Any) -> bool:
    """Whether a layer draws random numbers in training."""
    rates = [getattr(layer, name, None) for name in _RATES]
    found = [rate for rate in rates if isinstance(rate, (int, float))]
    return bool(layer._seed_generators) and (not found or any(found))


def has_dropout(network: Any) -> bool:
    """Whether a layer of the network draws random numbers in training."""
    return any(is_random(layer) for layer in network._flatten_layers())


@contextlib.contextmanager
def keyed_layers(network: Any, seeds: Any) -> Iterator[None]:
    """Draws the dropout masks of a network from the seeds of the rows.

    Args:
      network: A Keras model.
      seeds: (rows, SEED_WORDS), uint32.  Sensitive.
    """
    calls = iter(range(1 << 31))

    def dropout(inputs: Any, rate: float, noise_shape: Any) -> Any:
        shape = _mask_shape(inputs, noise_shape)
        bits = _bits(seeds, next(calls), shape)
        kept = bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
        return tf.where(kept, inputs / (1 - rate), 0.0) if rate < 1 else 0.0 * inputs

    with _replaced(network, dropout):
        yield


@contextlib.contextmanager
def still_layers(network: Any) -> Iterator[None]:
    """Switches dropout off, and refuses other layers that draw random numbers."""

    def dropout(inputs: Any, rate: float, noise_shape: Any) -> Any:
        del rate, noise_shape
        return tf.identity(inputs)

    with _replaced(network, dropout):
        yield


@contextlib.contextmanager
def _replaced(network: Any, dropout: _Dropout) -> Iterator[None]:
    """Replaces Keras's dropout, and refuses everything else that draws."""

    def instead(
        inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None
    ) -> Any:
        del seed
        return dropout(inputs, rate, noise_shape) if rate else inputs

    refuse = _refusal(network)
    with (
        _LOCK,
        plain_errors(),
        mock.patch.object(keras_random, "draw_seed", refuse),
        mock.patch.object(keras_image, "draw_seed", refuse),
        mock.patch.object(keras_random, "dropout", instead),
    ):
        yield


def _refusal(network: Any) -> Callable[[Any], Any]:
    """Returns what refuses a draw, by the name of the layer with that generator."""
    owners = {
        id(generator): f"{layer.name} is a {type(layer).__name__}, which"
        for layer in network._flatten_layers()
        for generator in layer._seed_generators
    }

    def refuse(generator: Any) -> Any:
        raise InputError(
            "Expected no layer that draws random numbers but dropout; "
            f"{owners.get(id(generator), 'a call of keras.random')} draws for a batch "
            "as a whole, not for each example. Remove it, or give what it does to "
            "one example alone as --augment."
        )

    return refuse


def _mask_shape(inputs: Any, noise_shape: Any) -> list[int]:
    """Returns the shape of the mask of one row."""
    shape = list(inputs.shape[1:])
    if noise_shape is not None:
        # A symbolic size is not 1, and would be a tensor in the comparison.
        known = [size if isinstance(size, int) else None for size in noise_shape]
        if known[0] == 1 != inputs.shape[0]:
            raise InputError(
                "Expected a noise_shape of Dropout that begins with None: one mask for "
                "all examples makes them depend on each other. Give (None, ...)."
            )
        shape = [
            1 if noise == 1 else size
            for size, noise in zip(shape, known[1:], strict=True)
        ]
    if None in shape:
        raise InputError(
            f"Expected Dropout on inputs of a known shape, not {tuple(shape)}: its "
            "mask is drawn for each example. Fix the shape of the model's inputs."
        )
    return shape


def _bits(seeds: Any, call: int, shape: list[int]) -> Any:
    """Returns uniform words (rows, *shape), uint32, by row a function of its seed."""
    one = [1] * len(shape)
    first, second = (tf.reshape(seeds[:, i : i + 1], [-1, *one]) for i in (2, 3))
    places = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * _GOLDEN
    of_call = np.uint64((call + 1) * _GOLDEN)
    bits = _mix(tf.bitwise.bitwise_xor(first, _words(places).reshape(1, *shape)))
    return _mix(tf.bitwise.bitwise_xor(bits, _mix(second + _words(of_call))))


def _words(values: Any) -> Any:
    return (values & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _mix(bits: Any) -> Any:
    """The finalizer of MurmurHash3: a bijection that spreads each bit to all."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        high = tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))
        bits = tf.bitwise.bitwise_xor(bits, high) * tf.constant(factor, tf.uint32)
    return bits


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
