"""Gaussian noise as a pure function of (noise key, step, variable, block).

Uniform mixing coefficients, of ModelMix, are one of (noise key, step, variable).
Noise of tables with lazy noise has streams of its own, for the rows that a step reads
and for a flush after it.

Formal guarantees:
  - ``normal`` and ``uniform`` return the same bits for the same arguments; a replayed
    step draws the same noise, so that a crash is not a second release.
  - For a uniform secret key, and up to the PRF assumptions on keyed BLAKE2b and AES-128
    (in counter mode), values of different (step, variable, block) are independent, and
    so are noise and mixing coefficients.
  - Values are drawn in double precision and rounded once: of ``grid_normal`` to
    integers (see ``grid``, also for attacks on low bits), of ``normal`` to float32.
  - The blocks of ``grid_normal`` that W workers draw add up to the same integers for
    every W, and each block is drawn by one of them.
  - Coefficients are in [0, 1], at most 2^-24 apart.  A mixture takes values on a grid
    of that share of the distance that is mixed.  Gaussian noise is added to it, of
    which the deviation is half a million grid points at ModelMix's published setting,
    and thousands where iterates are a hundred times as far apart.
  - Noise of deviation 0 is exactly zero, and nothing is drawn for it.
  - ``NoiseStream`` yields every step once, in order, whatever the speed of its reader.

Public: steps, shapes, standard deviations.  Sensitive: keys and every value drawn.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from randomgen import AESCounter

from pipelines.sampling.keys import derive
from trainer.workers.aligned_arrays import aligned

_AES_KEY_BYTES = 16

#: Values drawn at a time: doubles that stay in a core's cache.
_CHUNK = 1 << 15

#: What rounds a double below ``_MOST_ROUNDED``, and its bits, which stand for zero.
_TO_INTEGERS = 1.5 * 2.0**52
_BITS_OF_ZERO = np.float64(_TO_INTEGERS).view(np.int64)
_MOST_ROUNDED = 2.0**51

#: Values of a block of noise on a grid, which one worker draws.
_BLOCK = 1 << 17

#: Steps drawn ahead of the reader.  Each holds one integer per parameter.
_DEPTH = 2


def normal(
    noise_key: bytes,
    step: int,
    variable: int,
    shape: Sequence[int],
    *,
    stddev: float = 1.0,
) -> np.ndarray:
    """Returns float32 values of a centred normal distribution.  Sensitive.

    Args:
      noise_key: 32 secret bytes.
      step: The step of the run.
      variable: Index of the variable among the trainable ones.
      shape: Shape of the variable, or of the part of it that gets noise.
      stddev: Standard deviation of the distribution.
    """
    if stddev == 0:
        return np.zeros(shape, np.float32)
    generator = _generator(derive(noise_key, "noise", step, variable))
    values = np.empty(int(np.prod(shape, dtype=np.int64)), np.float32)
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        doubles = generator.standard_normal(len(part))
        np.multiply(doubles, stddev, out=part, casting="same_kind")
    return values.reshape(shape)


def grid_normal(
    noise_key: bytes,
    step: int,
    variable: int,
    shape: Sequence[int],
    *,
    stddev: float,
    share: tuple[int, int] = (0, 1),
) -> np.ndarray:
    """Returns int64 values: a centred normal distribution, rounded.  Sensitive.

    Args:
      noise_key: 32 secret bytes.
      step: The step of the run.
      variable: Index of the variable among the trainable ones.
      shape: Shape of the variable.
      stddev: Standard deviation, in units of the grid; at most 2^47.
      share: (r, W): the blocks r, r + W, ..., and zeros for the others.
    """
    if stddev > _MOST_ROUNDED / 16:  # no value of the sampler is above 13 deviations
        raise ValueError(f"Expected a deviation of at most 2^47 units, not {stddev}.")
    first, every = share
    whole = stddev and every == 1
    values = aligned(shape, np.empty if whole else np.zeros)
    flat = values.reshape(-1)
    for block in range(first, -(-len(flat) // _BLOCK) if stddev else 0, every):
        part = flat[block * _BLOCK : (block + 1) * _BLOCK]
        label = derive(noise_key, "grid-noise", step, variable, block)
        _fill_rounded(part, _generator(label), stddev)
    return values


def _fill_rounded(
    values: np.ndarray, generator: np.random.Generator, stddev: float
) -> None:
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        doubles = part.view(np.float64)
        generator.standard_normal(out=doubles)
        doubles *= stddev
        _round_small(doubles)


def _round_small(values: np.ndarray) -> np.ndarray:
    # Doubles of this size are integers apart, so that adding rounds to the nearest, and
    # their bits count up: vectorized, as a cast to integers is not.
    values += _TO_INTEGERS
    units = values.view(np.int64)
    units -= _BITS_OF_ZERO
    return units


def rounded(values: np.ndarray) -> np.ndarray:
    """Returns values rounded to the nearest integers, in their memory if they fit.

    Args:
      values: float64, at least one, below 2^63.
    """
    if max(values.max(), -values.min()) < _MOST_ROUNDED:
        return _round_small(values)
    return np.rint(values).astype(np.int64)


def uniform(
    noise_key: bytes, step: int, variable: int, shape: Sequence[int]
) -> np.ndarray:
    """Returns float32 values of the uniform distribution on [0, 1].  Sensitive.

    Args:
      noise_key: 32 secret bytes.
      step: The step of the run.
      variable: Index of the variable among the trainable ones.
      shape: Shape of the variable.
    """
    # Another label, hence another key and another stream than those of the noise.
    generator = _generator(derive(noise_key, "mixing-coefficients", step, variable))
    values = np.empty(int(np.prod(shape, dtype=np.int64)), np.float32)
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        part[:] = generator.random(len(part))
    return values.reshape(shape)


def _generator(key: bytes) -> np.random.Generator:
    # Half the cost of a normal from ChaCha, where processors have AES instructions.
    bits = AESCounter(key=int.from_bytes(key[:_AES_KEY_BYTES], "little"))
    return np.random.Generator(bits)


def row_seeds(
    noise_key: bytes, step: int, part: int, shape: Sequence[int]
) -> np.ndarray:
    """Returns the seeds of the rows of a physical batch, uniform uint32.  Sensitive.

    Args:
      noise_key: 32 secret bytes.
      step: The step of the run.
      part: Number of the physical batch within the step.
      shape: (rows, ...).
    """
    generator = _generator(derive(noise_key, "row-seeds", step, part))
    return generator.integers(0, 1 << 32, shape, np.uint32)


def step_noise(
    noise_key: bytes,
    step: int,
    shapes: Sequence[Sequence[int]],
    noise_stddev: float,
    units: Sequence[float | None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[np.ndarray]:
    """Returns the noise of one step for every variable.  Sensitive.

    Args:
      noise_key: Of the run.
      step: Of the plan, from 0.
      shapes: Of the noise of each variable.
      noise_stddev: Of one coordinate of the sum.
      units: Distance of the points of each variable's grid; None for float32.
      share: Of the blocks of noise on a grid, as of ``grid_normal``.
    """
    found = []
    rank, count = share
    for index, (shape, unit) in enumerate(
        zip(shapes, units or [None] * len(shapes), strict=True)
    ):
        if unit is None:
            found.append(normal(noise_key, step, index, shape, stddev=noise_stddev))
            continue
        stddev = noise_stddev / unit
        # Small variables have one block: not all of them are the first worker's.
        turn = (rank - index) % count, count
        found.append(
            grid_normal(noise_key, step, index, shape, stddev=stddev, share=turn)
        )
    return found


def mixing_coefficients(
    noise_key: bytes, step: int, shapes: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Returns the mixing coefficients of one step for every variable.  Sensitive.

    Args:
      noise_key: 32 secret bytes.
      step: The step of the run.
      shapes: Of the variables.
    """
    return [
        uniform(noise_key, step, index, shape) for index, shape in enumerate(shapes)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterNoise:
    """The noise of a step that a ``NoiseStream`` does not draw ahead: of lazy tables.

    Attributes:
      noise_key: 32 secret bytes.
      step: The step of the run.
      noise_stddev: Deviation of the noise of one step.
    """

    noise_key: bytes = dataclasses.field(repr=False)
    step: int
    noise_stddev: float

    def of_read(self, table: int, block: int, shape: Sequence[int]) -> np.ndarray:
        """Returns the noise of a block of the rows that the step reads.  Sensitive.

        Args:
          table: Index among the lazy ones.
          block: Of the rows, from 0.
          shape: Of the noise.

        Returns:
          float64, of the deviation of one step.
        """
        return self._draw("read", table, block, shape)

    def of_flush(self, table: int, block: int, shape: Sequence[int]) -> np.ndarray:
        """Returns the noise of a block of a table, of a flush after the step.

        Args:
          table: Index among the lazy ones.
          block: Of the rows, from 0.
          shape: Of the noise.

        Returns:
          float64, of the deviation of one step.  Sensitive.
        """
        return self._draw("flush", table, block, shape)

    def _draw(
        self, place: str, table: int, block: int, shape: Sequence[int]
    ) -> np.ndarray:
        if self.noise_stddev == 0:
            return np.zeros(shape)
        label = derive(self.noise_key, "lazy-noise", self.step, place, table, block)
        values = _generator(label).standard_normal(shape)
        values *= self.noise_stddev
        return values


#: (noise key, step, shapes) -> what one step draws beside its noise.
DrawStep = Callable[[bytes, int, Sequence[Sequence[int]]], list[np.ndarray]]


class NoiseStream:
    """Draws the noise of the next steps in a thread, while the current one trains.

    Yields ``step_noise``, followed by what ``draw`` returns if it is given.

    Example:
      >>> key = bytes(range(32))
      >>> with NoiseStream(
      ...     key, steps=range(3), shapes=[(2,)], noise_stddev=1.0) as stream:
      ...     len(list(stream))
      3
    """

    def __init__(
        self,
        noise_key: bytes,
        *,
        steps: range,
        shapes: Sequence[Sequence[int]],
        noise_stddev: float,
        units: Sequence[float | None] | None = None,
        share: tuple[int, int] = (0, 1),
        draw: DrawStep | None = None,
    ) -> None:
        self._draw_more = draw
        self._arguments = (noise_key, shapes, noise_stddev, units, share)
        self._steps = steps
        self._queue: queue.Queue[list[np.ndarray] | BaseException | None] = queue.Queue(
            _DEPTH
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> NoiseStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.05)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _draw(self) -> None:
        noise_key, shapes, noise_stddev, units, share = self._arguments
        try:
            for step in self._steps:
                if self._stopped.is_set():
                    return
                values = step_noise(noise_key, step, shapes, noise_stddev, units, share)
                if self._draw_more is not None:
                    values += self._draw_more(noise_key, step, shapes)
                self._queue.put(values)
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass
