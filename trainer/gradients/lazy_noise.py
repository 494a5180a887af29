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
from trainer.gradients.traced_model import TableReads
from trainer.tf_compat import tf
from trainer.workers.base import Alone, Workers
from trainer.workers.grid import Grid

#: Values of a block of noise, of whole rows, which one worker draws.
_BLOCK = 1 << 15

#: Blocks that a flush completes at a time.
_FLUSH_BLOCKS = 1 << 5

#: Blocks that are drawn at a time; NumPy draws without holding the interpreter.
_DRAW_THREADS = 2

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
        self._step_size = grid.unit / expected_batch_size
        self._unit = grid.unit
        # Sums of squared learning rates since the last flush: of all steps, and of
        # those whose noise a row has.  Float64, since their differences matter.
        self._total = _zeros((), tf.float64)
        self._reached = [_zeros(t.shape[:1], tf.float64) for t in self.tables]
        # Integers of this worker, and the rate of the step that they are of.
        self._sums = [_zeros(table.shape, tf.int64) for table in self.tables]
        self._rates = [_zeros(t.shape[:1], tf.float32) for t in self.tables]
        self._last_rate = _zeros((), tf.float32)
        self._least_rate = math.inf
        self._just_read = self._no_rows()
        rows = [tf.TensorSpec((None,), tf.int64) for _ in self.tables]
        units = [tf.TensorSpec((None, t.shape[1]), tf.int64) for t in self.tables]
        make = lambda act, *signature: tf.function(  # noqa: E731
            act, input_signature=signature, autograph=False
        )
        self._ids = tf.function(reads.ids, autograph=autograph)
        self._look_up = make(self._waiting, rows)
        self._update = make(self._apply, rows, units)
        self._count = make(self._count_rows, rows, tf.TensorSpec((), tf.float32))

    @property
    def num_pending(self) -> int:
        """Rows that lack noise.  Sensitive."""
        return sum(
            int(tf.math.count_nonzero(reached != self._total))
            for reached in self._reached
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

    def add(self, index: int, sums: Any) -> None:
        """Lets rows wait with a physical batch's integers; for a ``tf.function``.

        Args:
          index: Of the table.
          sums: ``tf.IndexedSlices`` of int64.
        """
        self._sums[index].scatter_add(sums)

    def count_step(self, learning_rate: Any) -> None:
        """Lets all rows lack the noise of one more step.

        Args:
          learning_rate: Of the step.

        Raises:
          InputError: rates since the last flush differ too much for integers.
        """
        self._count(self._just_read, tf.cast(learning_rate, tf.float32))
        self._just_read = self._no_rows()
        self._least_rate = min(self._least_rate, float(learning_rate) or math.inf)
        if math.sqrt(float(self._total)) > _MOST_RATIO * self._least_rate:
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
        if not float(self._total):
            return
        for index, start, stop in self._chunks():
            rows, firsts = self._no_rows(), [0] * len(self.tables)
            rows[index] = np.arange(start, stop)
            firsts[index] = start // self._block_rows(index)
            self._complete(rows, draw, firsts)
        self._total.assign(0.0)
        self._last_rate.assign(0.0)
        self._least_rate = math.inf
        for reached in self._reached:
            reached.assign(tf.zeros_like(reached))

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
        read = [np.zeros(table.shape[0], bool) for table in self.tables]
        for batch in batches:
            for mask, ids in zip(read, self._ids(*batch), strict=True):
                mask[ids.numpy()] = True
        packed = [np.packbits(mask) for mask in read]
        of_all = self._workers.gather(b"".join(bits.tobytes() for bits in packed))
        together = np.bitwise_or.reduce([np.frombuffer(one, "u1") for one in of_all])
        parts = np.split(together, np.cumsum([bits.size for bits in packed])[:-1])
        return [
            np.flatnonzero(np.unpackbits(bits, count=mask.size))
            for bits, mask in zip(parts, read, strict=True)
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
        sums, deviations = self._look_up(rows)
        units = [np.array(one) for one in sums]
        self._add_noise(units, [one.numpy() for one in deviations], draw, first_blocks)
        flat = self._workers.sum(np.concatenate([one.ravel() for one in units]))
        parts = np.split(flat, np.cumsum([one.size for one in units])[:-1])
        shaped = [p.reshape(one.shape) for p, one in zip(parts, units, strict=True)]
        self._update(rows, shaped)

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
            noise *= deviations[index][of_block, None]
            part += np.rint(noise, out=noise).astype(np.int64)

        blocks = [
            (index, block)
            for index, one in enumerate(units)
            for block in range(-(-len(one) // self._block_rows(index)))
        ][self._workers.rank :: self._workers.count]
        with concurrent.futures.ThreadPoolExecutor(_DRAW_THREADS) as pool:
            for _ in pool.map(lambda block: add(*block), blocks):
                pass  # what a thread raised is raised here

    # -- compiled ------------------------------------------------------------------

    def _waiting(self, rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns of rows their integers, and deviations of a step's unit of noise."""
        sums, deviations = [], []
        for index, ids in enumerate(rows):
            lacked = tf.sqrt(self._total - tf.gather(self._reached[index], ids))
            rates = tf.cast(self._rates_of(index, ids), tf.float64)
            sums.append(tf.gather(self._sums[index], ids))
            deviations.append(tf.math.divide_no_nan(lacked, rates * self._unit))
        return sums, deviations

    def _rates_of(self, index: int, ids: Any) -> Any:
        # Where no integers wait, any rate does, if only all workers take the same.
        rates = tf.gather(self._rates[index], ids)
        return tf.where(rates > 0, rates, tf.identity(self._last_rate))

    def _apply(self, rows: list[Any], units: list[Any]) -> None:
        total = tf.identity(self._total)
        for index, (ids, values) in enumerate(zip(rows, units, strict=True)):
            table = self.tables[index]
            sizes = self._rates_of(index, ids) * self._step_size
            change = tf.cast(values, tf.float32) * tf.expand_dims(sizes, 1)
            _put(table, ids, tf.gather(table, ids) - change)
            _put(self._sums[index], ids, tf.zeros_like(values))
            _put(self._reached[index], ids, tf.fill(tf.shape(ids), total))
            _put(self._rates[index], ids, tf.zeros_like(sizes))

    def _count_rows(self, rows: list[Any], rate: Any) -> None:
        self._total.assign_add(tf.cast(rate, tf.float64) ** 2)
        self._last_rate.assign(tf.where(rate > 0, rate, self._last_rate))
        for index, ids in enumerate(rows):
            _put(self._rates[index], ids, tf.fill(tf.shape(ids), rate))
            # A step of rate 0 moves nothing, at whatever rate its rows are completed.
            sums = tf.gather(self._sums[index], ids)
            _put(self._sums[index], ids, tf.where(rate > 0, sums, 0))


def _zeros(shape: Any, dtype: Any) -> Any:
    return tf.Variable(tf.zeros(shape, dtype), trainable=False)


def _put(variable: Any, rows: Any, values: Any) -> None:
    variable.scatter_update(tf.IndexedSlices(values, rows))
