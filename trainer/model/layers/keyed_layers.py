"""Random layers of Keras that draw from our seeds.

Keras's layers hold their random generator.  These contexts replace it:

    keyed_layers    Dropout within a network: each row's mask follows from its seed
    seeded_layers   any random layer, on one row: its draws follow from one seed
    still_layers    Dropout that drops nothing

Seeds are secret, and independent for every row of every step (``noise.row_seeds``).  A
mask is made of two words of the seed by the finalizer of MurmurHash3, whose statistics
suffice: privacy requires only that a row's mask is a function of its own seed, and that
seeds of different rows are independent and identically distributed.

Formal guarantees:
  - In ``keyed_layers`` the mask of a row is a function of its own seed, of the index
    of the layer's call in the forward pass, and of the shape of one row: a second pass
    has the same mask, whatever the other rows are.
  - In ``seeded_layers`` the draws of layers are a function of the seed and of the order
    of their calls.
  - A unit is dropped with the rate of the layer, up to 2^-32.
  - A layer within a network that draws anything but dropout masks is refused.
  - Afterwards the layers have their own generators, also after an exception.

Public: layers and rates.  Sensitive: seeds and masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accounting.validation import InputError
from trainer.tf_compat import tf

#: The column of a batch that holds seeds; no file has a column of this name.
SEEDS = "weight:seeds"

#: Words of a seed: the first two for augmentation, the others for masks.
SEED_WORDS = 4

#: Attributes of Keras's random layers that are 0 or None if they draw nothing.
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")

_GOLDEN = 0x9E3779B1


def is_random(layer: Any) -> bool:
    """Whether a layer draws random numbers in training."""
    if "BaseRandomLayer" not in {kind.__name__ for kind in type(layer).__mro__}:
        return False
    rates = [getattr(layer, name, None) for name in _RATES]
    found = [rate for rate in rates if rate is not None]
    return not found or any(found)


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

    with _replaced_generators(network, lambda layer: _MaskGenerator(layer, dropout)):
        yield


@contextlib.contextmanager
def still_layers(network: Any) -> Iterator[None]:
    """Switches dropout off, and refuses other layers that draw random numbers."""

    def dropout(inputs: Any, rate: float, noise_shape: Any) -> Any:
        del rate, noise_shape
        return tf.identity(inputs)

    with _replaced_generators(network, lambda layer: _MaskGenerator(layer, dropout)):
        yield


@contextlib.contextmanager
def seeded_layers(layers: Any, seed: Any) -> Iterator[None]:
    """Draws all random numbers of layers from one seed.

    Args:
      layers: A Keras layer or model, called on one row.
      seed: (2,), int64.  Sensitive.
    """
    generator = _SeededGenerator(seed)
    with _replaced_generators(layers, lambda layer: generator):
        yield


@contextlib.contextmanager
def _replaced_generators(network: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    found = [
        (layer, layer._random_generator)
        for layer in network._flatten_layers()
        if hasattr(layer, "_random_generator")
    ]
    try:
        for layer, _ in found:
            # Through __dict__: Keras tracks attributes that are assigned.
            vars(layer)["_random_generator"] = make(layer)
        yield
    except InputError as error:
        # Keras adds lines with the arguments of the call.
        lines = [line for line in str(error).splitlines() if "Expected" in line]
        raise InputError(lines[0] if lines else str(error)) from None
    finally:
        for layer, generator in found:
            vars(layer)["_random_generator"] = generator


class _MaskGenerator:
    """Stands in for Keras's generator; has dropout, and refuses all other draws."""

    def __init__(self, layer: Any, dropout: Callable[[Any, float, Any], Any]) -> None:
        self._layer = layer
        self._dropout = dropout

    def dropout(self, inputs: Any, rate: float, noise_shape: Any = None) -> Any:
        """Returns inputs after dropout, as Keras's generator.

        Args:
          inputs: (rows, ...).
          rate: Probability that a unit is dropped.
          noise_shape: Shape of the mask; 1 where an axis shares it.
        """
        return self._dropout(inputs, rate, noise_shape)

    def _refuse(self, *args: Any, **more: Any) -> Any:
        name, kind = self._layer.name, type(self._layer).__name__
        raise InputError(
            f"Expected no layer that draws random numbers but Dropout; {name} is a "
            f"{kind}, which draws for a batch as a whole, not for each example. Remove "
            "it, or give what it does to inputs as --augment."
        )

    random_uniform = random_normal = truncated_normal = _refuse
    make_seed_for_stateless_op = make_legacy_seed = _refuse


class _SeededGenerator:
    """Stands in for Keras's generator; every call has a seed of its own."""

    def __init__(self, seed: Any) -> None:
        self._seed = seed
        self._calls = 0

    def make_seed_for_stateless_op(self) -> Any:
        """Returns the seed of the next call, (2,), int64."""
        self._calls += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._calls)

    def random_uniform(
        self,
        shape: Any,
        minval: Any = 0.0,
        maxval: Any = None,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        """Draws as Keras; see `keras.backend.RandomGenerator.random_uniform`."""
        del nonce  # every call has its own seed
        return tf.random.stateless_uniform(
            shape, self.make_seed_for_stateless_op(), minval, maxval,
            dtype or tf.float32,
        )  # fmt: skip

    def random_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = None,
        nonce: Any = None,
    ) -> Any:
        """Draws as Keras; see `keras.backend.RandomGenerator.random_normal`."""
        del nonce
        return tf.random.stateless_normal(
            shape, self.make_seed_for_stateless_op(), mean, stddev, dtype or tf.float32
        )

    def dropout(self, inputs: Any, rate: float, noise_shape: Any = None) -> Any:
        """Drops as Keras; see `keras.backend.RandomGenerator.dropout`."""
        return tf.nn.experimental.stateless_dropout(
            inputs, rate, self.make_seed_for_stateless_op(), noise_shape=noise_shape
        )

    def _maybe_init(self) -> None:
        """Does nothing: Keras calls it when a layer is built."""


def _mask_shape(inputs: Any, noise_shape: Any) -> list[int]:
    """Returns the shape of the mask of one row."""
    shape = inputs.shape[1:].as_list()
    if noise_shape is not None:
        if not tf.is_tensor(noise_shape):
            noise_shape = tf.stack([tf.cast(size, tf.int32) for size in noise_shape])
        noise_shape = tf.get_static_value(noise_shape, partial=True)
        if noise_shape is None or noise_shape[0] == 1 != inputs.shape[0]:
            raise InputError(
                "Expected a noise_shape of Dropout that begins with None: one mask for "
                "all examples makes them depend on each other. Give (None, ...)."
            )
        shape = [
            1 if noise == 1 else size
            for size, noise in zip(shape, noise_shape[1:], strict=True)
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
