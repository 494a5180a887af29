"""Noise for rows of embedding tables when they are read, instead of at every step.

Under plain SGD the noise of a step is added to a weight, and nothing looks at it until
the weight is read.  The gradients of a row wait as well, as integers on the grid of the
run: those of one step, at its rate r, since a row that has any was read in that step.
Between two reads, at which the squared learning rates sum to ``s`` and to ``S``, a row
collects the integers m and lacks noise of variance (S - s) (sigma C / b)^2.  Before it
is read again, and in a flush, it becomes

    w - (r / b) * unit * (m + k),    k = round(N(0, 1) sigma C sqrt(S - s) / (r unit))

So a step costs what the rows cost that it reads, whatever the size of the table.  With
several workers the rows that any of them reads are completed by all, with the sum of
their integers; each of them draws some of the blocks of noise.

Formal guarantees:
  - The joint law of all weights that steps read, and of the weights after a flush, is
    that of noise added to every row at every step, for any learning rates (up to one
    rounding to the grid for each read).
  - Noise and gradients of a row meet as integers.
  - No drawn value is used twice: a stream belongs to one block of rows of one (step,
    table), or of one flush, and no row occurs twice in it.
  - What is drawn depends on key, step, table and block alone, and a flush on steps that
    are fixed beforehand: a replayed step is the same release.
  - Weights are the same bits for any number of workers, and any split of a step.
  - ``flush`` leaves no row behind; ``num_pending`` counts those that are.

What remains.  How often a weight is rounded to float32 between two flushes follows
from how often it was read, and with a schedule so does the distance of its grid: the
low bits of such a row are not a function of its sums alone, as those of others are.

Public: which tables are lazy, and when they are flushed.  Sensitive: which rows are
pending, since that follows from the batches; and a table that was not flushed.

References:
  Lim et al. (2024), arXiv:2404.08847.  The sum of squared learning rates in the place
  of their count makes schedules exact.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.validation import InputError
from trainer.gradients.noise import rounded
from trainer.gradients.traced_model import TableReads
from trainer.tf_compat import tf
from trainer.workers import tensor_memory
from trainer.workers.aligned_arrays import aligned
from trainer.workers.base import Alone, Workers
from trainer.workers.grid import Grid

#: Values of a block of noise, of whole rows, which one worker draws.
_BLOCK = 1 << 15

#: Values that are rounded at a time, in the nearest cache.
_CHUNK = 1 << 12

#: Blocks that a flush completes at a time.
_FLUSH_BLOCKS = 1 << 5

#: Blocks that are drawn at a time; NumPy draws without holding the interpreter.
_DRAW_THREADS = 2

#: Where fewer than one row in so many is read, a sort is faster than a look at all.
_SPARSE = 1 << 5

#: Of the noise of all steps between two flushes, over the least rate in between: with
#: the bound of `grid` on the noise of a step, no integer overflows.
_MOST_RATIO = 1 << 20

#: (table, block, shape) -> noise of a block of rows, float64, of the deviation of a
#: step's.  Blocks of a table count from 0, in a step as in a flush.
DrawBlock = Callable[[int, int, Sequence[int]], np.ndarray]

#: (columns, weight) of a physical batch.
Batch = tuple[Mapping[str, Any], Any]


class LazyNoise:
    """The tables with lazy noise, and what each row waits for.

    Args:
      reads: The tables, and which of their rows a physical batch reads.
      expected_batch_size: The plan's constant divisor.
      grid: Of the run.
      workers: Who take the steps together.
      autograph: Whether the reads need AutoGraph.
    """

    def __init__(
        self,
        reads: TableReads,
        *,
        expected_batch_size: int,
        grid: Grid,
        workers: Workers | None = None,
        autograph: bool = False,
    ) -> None:
        self.tables = reads.tables
        self._workers: Workers = workers or Alone()
        self._step_size = np.float32(grid.unit / expected_batch_size)
        self._unit = grid.unit
        # Sums of squared learning rates since the last flush: of all steps, and of
        # those whose noise a row has.  Float64, since their differences matter.
        self._total = 0.0
        self._reached = [np.zeros(table.shape[0]) for table in self.tables]
        # Integers of this worker, and the rate of the step that they are of; where that
        # is 0, no integers wait.
        self._sums = [aligned(t.shape, np.zeros) for t in self.tables]
        self._rates = [np.zeros(table.shape[0], np.float32) for table in self.tables]
        self._last_rate = np.float32(0)
        self._least_rate = math.inf
        # The rows that this step reads, the place of each among them, and its integers.
        self._just_read = self._no_rows()
        self._places = [_variable((t.shape[0],), tf.int32) for t in self.tables]
        self._new = [_variable((None, t.shape[1]), tf.int64) for t in self.tables]
        self._starts = [*map(_start_of, self._places, self._new)]
        self._ids = tf.function(reads.ids, autograph=autograph)
        self._updates = [_update_of(table) for table in self.tables]

    @property
    def num_pending(self) -> int:
        """Rows that lack noise.  Sensitive."""
        return sum(
            int(np.count_nonzero(reached != self._total)) for reached in self._reached
        )

    def complete_reads(self, batches: Sequence[Batch], draw: DrawBlock) -> None:
        """Completes the rows that a step reads, at any worker, before it reads them.

        Args:
          batches: This worker's physical batches of the step.
          draw: Gives the noise of a block of the rows, keyed by the step.
        """
        rows = self._rows_of_all(batches)
        self._complete(rows, draw, first_blocks=[0] * len(rows))
        self._just_read = rows
        for start, ids in zip(self._starts, rows, strict=True):
            start(ids)

    def add(self, index: int, sums: Any) -> None:
        """Adds a physical batch's integers to those of the step; for a ``tf.function``.

        Args:
          index: Of the table.
          sums: ``tf.IndexedSlices`` of int64, of rows that the step reads.
        """
        places = tf.gather(self._places[index], sums.indices)
        self._new[index].scatter_add(tf.IndexedSlices(sums.values, places))

    def count_step(self, learning_rate: Any) -> None:
        """Lets the step's integers wait, and all rows lack the noise of one more step.

        Args:
          learning_rate: Of the step.

        Raises:
          InputError: rates since the last flush differ too much for integers.
        """
        rate = np.float32(learning_rate)
        self._total += float(rate) ** 2
        if rate > 0:  # else the step moves nothing
            self._last_rate = rate
            self._least_rate = min(self._least_rate, float(rate))
            for index, ids in enumerate(self._just_read):
                new = self._new[index].read_value()
                self._sums[index][ids] = tensor_memory.array(new)
                self._rates[index][ids] = rate
        self._just_read = self._no_rows()
        if math.sqrt(self._total) > _MOST_RATIO * self._least_rate:
            raise InputError(
                f"Expected learning rates that differ by less than {_MOST_RATIO:,} "
                "times between two evaluations or checkpoints, for lazy noise. Take "
                "another schedule, or give --embedding-noise dense."
            )

    def flush(self, draw: DrawBlock) -> None:
        """Completes all rows; does nothing where they are.

        Args:
          draw: Gives the noise of a block of a table, keyed by the step of this flush.
        """
        if not self._total:
            return
        for index, start, stop in self._chunks():
            rows, firsts = self._no_rows(), [0] * len(self.tables)
            rows[index] = np.arange(start, stop)
            firsts[index] = start // self._block_rows(index)
            self._complete(rows, draw, firsts)
        self._total, self._last_rate = 0.0, np.float32(0)
        self._least_rate = math.inf
        for reached in self._reached:
            reached[:] = 0

    def _chunks(self) -> Iterator[tuple[int, int, int]]:
        """Yields (table, first row, row after the last) of whole blocks of rows."""
        for index, table in enumerate(self.tables):
            num_rows, size = table.shape[0], _FLUSH_BLOCKS * self._block_rows(index)
            for start in range(0, num_rows, size):
                yield index, start, min(start + size, num_rows)

    def _block_rows(self, index: int) -> int:
        return max(1, _BLOCK // self.tables[index].shape[1])

    def _no_rows(self) -> list[np.ndarray]:
        return [np.zeros(0, np.int64) for _ in self.tables]

    def _rows_of_all(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """Returns the sorted rows of each table that any worker reads in a step."""
        of_batches = [[ids.numpy() for ids in self._ids(*batch)] for batch in batches]
        read = [
            _distinct([ids[index] for ids in of_batches], table.shape[0])
            for index, table in enumerate(self.tables)
        ]
        return read if self._workers.count == 1 else self._union(read)

    def _union(self, read: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the sorted rows of each table that any worker has in ``read``."""
        sizes = [table.shape[0] for table in self.tables]
        masks = [np.zeros(size, bool) for size in sizes]
        for mask, ids in zip(masks, read, strict=True):
            mask[ids] = True
        packed = [np.packbits(mask) for mask in masks]
        of_all = self._workers.gather(b"".join(bits.tobytes() for bits in packed))
        together = np.bitwise_or.reduce([np.frombuffer(one, "u1") for one in of_all])
        parts = np.split(together, np.cumsum([bits.size for bits in packed])[:-1])
        return [
            np.flatnonzero(np.unpackbits(bits, count=size))
            for bits, size in zip(parts, sizes, strict=True)
        ]

    def _complete(
        self, rows: list[np.ndarray], draw: DrawBlock, first_blocks: Sequence[int]
    ) -> None:
        """Adds to distinct rows of each table what they wait for, and what they lack.

        Args:
          rows: Of each table, the same at every worker.
          draw: Of the step, or of the flush.
          first_blocks: Of each table, the number of its first block of noise.
        """
        units, sizes, deviations = [], [], []
        for index, ids in enumerate(rows):
            waits = self._rates[index][ids]
            # Where no integers wait, any rate does, if all workers take the same.
            rates = np.where(waits > 0, waits, self._last_rate)
            sizes.append(rates * self._step_size)
            deviations.append(self._deviations(index, ids, rates))
            units.append(_taken(self._sums[index], ids))
            units[-1][waits == 0] = 0
        self._add_noise(units, deviations, draw, first_blocks)
        units = self._summed(units)
        for index, ids in enumerate(rows):
            summed = tensor_memory.tensor(units[index])
            self._updates[index](ids, summed, sizes[index])
            self._reached[index][ids] = self._total
            self._rates[index][ids] = 0

    def _deviations(self, index: int, ids: np.ndarray, rates: np.ndarray) -> np.ndarray:
        """Returns what to multiply the noise of a step by, for what rows lack."""
        lacked = np.sqrt(self._total - self._reached[index][ids])
        of_unit = rates.astype(np.float64) * self._unit
        return np.divide(lacked, of_unit, out=np.zeros(len(ids)), where=rates > 0)

    def _summed(self, units: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the sums over the workers of integers of rows of each table."""
        if self._workers.count == 1:
            return units
        # One vector: every exchange has its own cost.
        flat = self._workers.sum(np.concatenate([one.ravel() for one in units]))
        parts = np.split(flat, np.cumsum([one.size for one in units])[:-1])
        return [p.reshape(one.shape) for p, one in zip(parts, units, strict=True)]

    def _add_noise(
        self,
        units: Sequence[np.ndarray],
        deviations: Sequence[np.ndarray],
        draw: DrawBlock,
        first_blocks: Sequence[int],
    ) -> None:
        """Adds this worker's blocks of noise to rows of each table."""

        def add(index: int, block: int) -> None:
            size = self._block_rows(index)
            of_block = slice(block * size, (block + 1) * size)
            part = units[index][of_block]
            noise = draw(index, first_blocks[index] + block, part.shape)
            _add_rounded(part, noise, deviations[index][of_block])

        blocks = [
            (index, block)
            for index, one in enumerate(units)
            for block in range(-(-len(one) // self._block_rows(index)))
        ][self._workers.rank :: self._workers.count]
        with concurrent.futures.ThreadPoolExecutor(_DRAW_THREADS) as pool:
            for _ in pool.map(lambda block: add(*block), blocks):
                pass  # what a thread raised is raised here


def _variable(shape: Sequence[int | None], dtype: Any) -> Any:
    start = tf.zeros([size or 0 for size in shape], dtype)
    return tf.Variable(start, trainable=False, shape=shape)


def _distinct(ids: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Returns the sorted distinct values of arrays, each in [0, num_rows)."""
    together = np.concatenate([np.zeros(0, np.int64), *ids])
    if len(together) < num_rows // _SPARSE:
        return np.unique(together)
    mask = np.zeros(num_rows, bool)
    mask[together] = True
    return np.flatnonzero(mask)


def _taken(sums: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns a copy of rows."""
    out = aligned((len(ids), sums.shape[1]))
    # With another mode, NumPy copies what it takes once more.
    return np.take(sums, ids, axis=0, out=out, mode="clip")


def _add_rounded(units: np.ndarray, noise: np.ndarray, deviations: np.ndarray) -> None:
    """Adds noise, each row's times its deviation, to integers; uses its memory."""
    size = max(1, _CHUNK // noise.shape[1])
    for start in range(0, len(units), size):
        rows = slice(start, start + size)
        noise[rows] *= deviations[rows, None]
        units[rows] += rounded(noise[rows])


def _start_of(places: Any, new: Any) -> Any:
    """Returns what gives rows of a table places, where no integers are."""

    def start(ids: Any) -> None:
        size = tf.shape(ids)[0]
        places.scatter_update(tf.IndexedSlices(tf.range(size), ids))
        new.assign(tf.zeros((size, new.shape[1]), tf.int64))

    signature = [tf.TensorSpec((None,), tf.int64)]
    return tf.function(start, input_signature=signature, autograph=False)


def _update_of(table: Any) -> Any:
    """Returns what takes integers, each row's times its size, from rows of a table."""

    def update(ids: Any, units: Any, sizes: Any) -> None:
        change = tf.cast(units, tf.float32) * tf.expand_dims(sizes, 1)
        rows = tf.gather(table, ids) - change
        table.scatter_update(tf.IndexedSlices(rows, ids))

    signature = [
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None, table.shape[1]), tf.int64),
        tf.TensorSpec((None,), tf.float32),
    ]
    return tf.function(update, input_signature=signature, autograph=False)
