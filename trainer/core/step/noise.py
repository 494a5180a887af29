"""Gaussian noise as a pure function of (secret, step, variable, block).

ModelMix's uniform mixing coefficients are a function of (secret, step, variable).
Tables with lazy noise have streams of their own, for the rows that a step reads and for
a flush after the step.

Formal guarantees:
  - The same arguments give the same bits: a replayed step has the same noise, so that a
    crash causes no second release.
  - For a uniform secret key, and up to the PRF assumptions on keyed BLAKE2b and AES-128
    (in counter mode), values of different (step, variable, block) are independent, and
    so are noise and mixing coefficients.
  - Values are drawn in double precision and rounded once, to integers (see
    ``core.step.grid``, also on attacks on low bits).  There is no noise without a grid.
  - The blocks of ``grid_normal`` that W workers draw add up to the same integers for
    every W, and each block is drawn by one worker.
  - Mixing coefficients are in [0, 1].  Neighbouring values are at most 2^-24 apart, and
    so are neighbouring mixtures, as a share of the distance of the iterates.  The noise
    that is added to a mixture has a standard deviation of about 500,000 such distances
    at ModelMix's published setting, and of thousands if the iterates are a hundred
    times as far apart.
  - With ``bands`` c, W_t = round(Z'_t - sum of c_j W_(t-j)) without any error.  Z_t is
    what step t draws without bands, Z'_t is Z_t rounded to the nearest multiple of
    1 / FINE, plus half of one, and W is 0 before the first step of a stream: noise of k
    bands, for which `accounting.core.samplers.cyclic_poisson` has the theorem.
  - A worker keeps those blocks of W that it draws, and no others.
  - Noise of standard deviation 0 is exactly zero, and nothing is drawn for it.
  - ``NoiseStream`` yields every step once and in order, whatever the speed of its
    reader.

Proof that doubles have no error in W.  Z is at most 2^32 units times 13 (the sampler
draws none above 13 deviations), and W at most four times that: for k up to
`plan.MOST_BANDS`, the magnitudes of a row of C^-1 add up to at most 4, and to below 77
times the sum of c_1, ..., c_(k-1).  So all that is added is below 2^42, and so is every
sum of a part of it: multiples of 2^-11 below 2^42 have 53 bits.  W_t is never halfway
between two integers.

Public: steps, shapes, standard deviations.  Sensitive: keys and every value drawn.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from randomgen import AESCounter

from accounting.core.samplers.cyclic_poisson import FINE
from pipelines.core.keys import derive

#: The column of a batch that holds seeds; no file has a column of this name.
SEEDS = "weight:seeds"

_AES_KEY_BYTES = 16

#: Number of values drawn at a time: doubles that fit a core's cache.
_CHUNK = 1 << 15

#: Adding this to a double of magnitude below ``_MOST_ROUNDED`` rounds it to an integer,
#: by which the bits of the sum exceed ``_BITS_OF_ZERO``.
_TO_INTEGERS = 1.5 * 2.0**52
_BITS_OF_ZERO = np.float64(_TO_INTEGERS).view(np.int64)
_MOST_ROUNDED = 2.0**51

#: Number of values of a block of noise on a grid, which one worker draws.
_BLOCK = 1 << 17

#: Number of steps whose noise waits for the reader, besides the one being drawn.  Each
#: holds one integer per parameter.
_DEPTH = 2


#: As ``_TO_INTEGERS``, to multiples of 1 / FINE.
_TO_FINE = _TO_INTEGERS / FINE


class EarlierNoise:
    """The noise of the last steps; noise with bands takes off a part.  Sensitive.

    Args:
      bands: c_0 = 1, c_1, ..., c_(k-1): multiples of 1 / FINE.
    """

    def __init__(self, bands: Sequence[float]) -> None:
        self._bands = bands
        # The noise of the step that is being drawn comes first.
        self._steps = collections.deque[dict[tuple[int, int], np.ndarray]](
            [{}], maxlen=len(bands)
        )

    def of_block(self, variable: int, block: int) -> list[tuple[float, np.ndarray]]:
        """Returns coefficients, and the values of a block that they multiply.

        Args:
          variable: Index of the variable.
          block: Index of the block in it.
        """
        pairs = [*zip(self._bands, self._steps, strict=False)][1:]
        return [(each, step[variable, block]) for each, step in pairs]

    def keep(self, variable: int, block: int, values: np.ndarray) -> None:
        """Keeps the noise of a block of the step.

        Args:
          variable: Index of the variable.
          block: Index of the block in it.
          values: Noise of the block, which is copied: its reader may write into it.
        """
        if len(self._steps) < len(self._bands):
            kept = np.empty(values.shape)
        else:  # that of the oldest step is not needed any more
            kept = self._steps[-1].pop((variable, block))
        kept[:] = values
        self._steps[0][variable, block] = kept

    def end_step(self) -> None:
        """Begins the next step."""
        self._steps.appendleft({})


def grid_normal(
    secret: bytes,
    step: int,
    variable: int,
    shape: Sequence[int],
    *,
    stddev: float,
    share: tuple[int, int] = (0, 1),
    earlier: EarlierNoise | None = None,
) -> np.ndarray:
    """Returns normal values of mean 0, rounded to integers, int64.  Sensitive.

    Args:
      secret: 32 bytes.
      step: Step of the run, from 0.
      variable: Index of the variable among the trainable ones.
      shape: Shape of the variable.
      stddev: Standard deviation in units of the grid, at most 2^47.
      share: (r, W) to draw the blocks r, r + W, ... and have zeros in the others.
      earlier: The noise of the last steps, for noise with bands; None for independent
        noise.

    Raises:
      ValueError: ``stddev`` is above 2^47, or above 2^32 with bands.
    """
    # The sampler draws none above 13 deviations.
    most = 47 if earlier is None else 32
    if stddev > 2.0**most:
        raise ValueError(f"Expected a deviation of at most 2^{most} units: {stddev}.")
    first, every = share
    whole = stddev and every == 1
    values = aligned(shape, np.empty if whole else np.zeros)
    flat = values.reshape(-1)
    for block in range(first, -(-len(flat) // _BLOCK) if stddev else 0, every):
        part = flat[block * _BLOCK : (block + 1) * _BLOCK]
        label = derive(secret, "grid-noise", step, variable, block)
        known = None if earlier is None else earlier.of_block(variable, block)
        _fill_rounded(part, _generator(label), stddev, known)
        if earlier is not None:
            earlier.keep(variable, block, part)
    return values


def _fill_rounded(
    values: np.ndarray,
    generator: np.random.Generator,
    stddev: float,
    earlier: list[tuple[float, np.ndarray]] | None,
) -> None:
    product = np.empty(_CHUNK if earlier else 0)
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        doubles = part.view(np.float64)
        generator.standard_normal(out=doubles)
        doubles *= stddev
        if earlier is not None:
            doubles += _TO_FINE
            doubles -= _TO_FINE
            doubles += 0.5 / FINE
        for coefficient, before in earlier or ():
            chunk = before[start : start + _CHUNK]
            doubles -= np.multiply(chunk, coefficient, out=product[: len(chunk)])
        _round_small(doubles)


def _round_small(values: np.ndarray) -> np.ndarray:
    # Doubles of this size are the integers: the addition rounds to the nearest, and the
    # bits count them.  NumPy vectorises this, but not a cast to integers.
    values += _TO_INTEGERS
    units = values.view(np.int64)
    units -= _BITS_OF_ZERO
    return units


def rounded(values: np.ndarray) -> np.ndarray:
    """Returns values rounded to the nearest integers, int64; may overwrite them.

    Args:
      values: At least one float64 of magnitude below 2^63.
    """
    if max(values.max(), -values.min()) < _MOST_ROUNDED:
        return _round_small(values)
    return np.rint(values).astype(np.int64)


def uniform(
    secret: bytes, step: int, variable: int, shape: Sequence[int]
) -> np.ndarray:
    """Returns uniform values in [0, 1], float32.  Sensitive.

    Args:
      secret: 32 bytes.
      step: Step of the run, from 0.
      variable: Index of the variable among the trainable ones.
      shape: Shape of the variable.
    """
    # A label of its own gives a stream other than the noise's.
    generator = _generator(derive(secret, "mixing-coefficients", step, variable))
    values = np.empty(int(np.prod(shape, dtype=np.int64)), np.float32)
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        part[:] = generator.random(len(part))
    return values.reshape(shape)


def _generator(key: bytes) -> np.random.Generator:
    # With AES instructions, a normal value costs half of one from ChaCha.
    bits = AESCounter(key=int.from_bytes(key[:_AES_KEY_BYTES], "little"))
    return np.random.Generator(bits)


def row_seeds(secret: bytes, step: int, part: int, shape: Sequence[int]) -> np.ndarray:
    """Returns the seeds of the rows of a physical batch, uniform uint32.  Sensitive.

    Args:
      secret: 32 bytes.
      step: Step of the run, from 0.
      part: Index of the physical batch within the step.
      shape: Shape of the seeds, (rows, ...).
    """
    generator = _generator(derive(secret, "row-seeds", step, part))
    return generator.integers(0, 1 << 32, shape, np.uint32)


def step_noise(
    secret: bytes,
    step: int,
    shapes: Sequence[Sequence[int]],
    noise_stddev: float,
    unit: float | None,
    share: tuple[int, int] = (0, 1),
    earlier: EarlierNoise | None = None,
) -> list[np.ndarray]:
    """Returns the noise of one step, an array of integers per variable.  Sensitive.

    Args:
      secret: 32 bytes.
      step: Step of the run, from 0.
      shapes: Shape of each variable's noise.
      noise_stddev: Standard deviation of each coordinate of the sum of gradients.
      unit: Distance of grid points; None without noise, which is then zeros in float32.
      share: (r, W) for the blocks of noise that worker r of W draws.
      earlier: As for ``grid_normal``.

    Raises:
      ValueError: there is noise, and no grid.
    """
    if unit is None:
        if noise_stddev:
            raise ValueError("Expected a grid for noise.")
        return [np.zeros(shape, np.float32) for shape in shapes]
    rank, count = share
    return [
        grid_normal(
            secret,
            step,
            index,
            shape,
            stddev=noise_stddev / unit,
            # Small variables have one block each: workers take turns.
            share=((rank - index) % count, count),
            earlier=earlier,
        )
        for index, shape in enumerate(shapes)
    ]


def mixing_coefficients(
    secret: bytes, step: int, shapes: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Returns the mixing coefficients of one step, an array per variable.  Sensitive.

    Args:
      secret: 32 bytes.
      step: Step of the run, from 0.
      shapes: Shape of each variable.
    """
    return [uniform(secret, step, index, shape) for index, shape in enumerate(shapes)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterNoise:
    """The noise of lazy tables, drawn when a step or a flush needs it.

    Attributes:
      secret: 32 bytes.
      step: Step of the run, from 0.
      noise_stddev: Standard deviation of each coordinate of the noise of one step.
    """

    secret: bytes = dataclasses.field(repr=False)
    step: int
    noise_stddev: float

    def of_read(self, table: int, block: int, shape: Sequence[int]) -> np.ndarray:
        """Returns the noise of a block of rows before a read, float64.  Sensitive.

        Args:
          table: Index of the table among the lazy ones.
          block: Index of the block among those of the rows that the step reads.
          shape: Shape of the noise.
        """
        return self._draw("read", table, block, shape)

    def of_flush(self, table: int, block: int, shape: Sequence[int]) -> np.ndarray:
        """Returns the noise of a block of a table in a flush, float64.  Sensitive.

        Args:
          table: Index of the table among the lazy ones.
          block: Index of the block in the table.
          shape: Shape of the noise.
        """
        return self._draw("flush", table, block, shape)

    def _draw(
        self, place: str, table: int, block: int, shape: Sequence[int]
    ) -> np.ndarray:
        if self.noise_stddev == 0:
            return np.zeros(shape)
        label = derive(self.secret, "lazy-noise", self.step, place, table, block)
        values = _generator(label).standard_normal(shape)
        values *= self.noise_stddev
        return values


#: (secret, step, shapes) -> further arrays of one step.
DrawStep = Callable[[bytes, int, Sequence[Sequence[int]]], list[np.ndarray]]


class NoiseStream:
    """Draws the noise of the next steps in a thread while the current step runs.

    Yields for each step the arrays of ``step_noise``, and then those of ``draw``.

    Args:
      secret: 32 bytes.
      steps: Steps of the run, in order.
      shapes: Shape of each variable's noise.
      noise_stddev: Standard deviation of each coordinate of the sum of gradients.
      unit: Distance of grid points; None without noise.
      share: (r, W) for the blocks of noise that worker r of W draws.
      draw: Draws further arrays of a step; None for none.
      bands: c_0 = 1, c_1, ..., c_(k-1) of noise of k bands, which keeps the noise of
        k - 1 steps in memory; (1,) for independent noise.

    Example:
      >>> key = bytes(range(32))
      >>> with NoiseStream(
      ...     key, steps=range(3), shapes=[(2,)], noise_stddev=1.0, unit=0.5) as stream:
      ...     len(list(stream))
      3
    """

    def __init__(
        self,
        secret: bytes,
        *,
        steps: range,
        shapes: Sequence[Sequence[int]],
        noise_stddev: float,
        unit: float | None,
        share: tuple[int, int] = (0, 1),
        draw: DrawStep | None = None,
        bands: Sequence[float] = (1.0,),
    ) -> None:
        self._draw_more = draw
        self._earlier = EarlierNoise(bands) if len(bands) > 1 else None
        self._arguments = (secret, shapes, noise_stddev, unit, share)
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
        secret, shapes, noise_stddev, unit, share = self._arguments
        try:
            for step in self._steps:
                if self._stopped.is_set():
                    return
                values = step_noise(
                    secret, step, shapes, noise_stddev, unit, share, self._earlier
                )
                if self._earlier is not None:
                    self._earlier.end_step()
                if self._draw_more is not None:
                    values += self._draw_more(secret, step, shapes)
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


#: TensorFlow assumes that a tensor's values begin at a multiple of this many bytes.
ALIGNMENT = 64


def aligned(
    shape: Sequence[int], make: Callable[..., np.ndarray] = np.empty
) -> np.ndarray:
    """Returns an int64 array whose memory a tensor can share.

    Args:
      shape: Shape of the array.
      make: (number of values, dtype) -> array of one dimension, such as ``np.zeros``.
    """
    size = int(np.prod(shape, dtype=np.int64))
    values = make(size + ALIGNMENT // 8, np.int64)
    return values[-values.ctypes.data % ALIGNMENT // 8 :][:size].reshape(shape)
