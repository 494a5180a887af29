"""Lazy noise: rows of embedding tables receive noise when they are read.

Under plain SGD, the noise that a step adds to a weight has no effect before the weight
is read.  So it is added when its row is next read.  The gradients of the step that last
read the row are added then, too; until then they are integers m on the grid of the run,
kept with the learning rate r of that step.  Let the squared learning rates of the steps
before two successive reads sum to ``s`` and ``S``.  Between them the row lacks noise of
variance (S - s) (sigma C / b)^2.  Before the second read, or in a flush, the row is
completed: its weights w become

    w - (r / b) * unit * (m + k),    k = round(N(0, 1) sigma C sqrt(S - s) / (r unit))

The cost of a step depends on the number of rows that it reads, not on the size of the
table.  With several workers, each completes the rows that any of them reads, with the
sum of all workers' integers, and draws some of the blocks of noise.  In a flush each
worker completes some of the rows and sends their weights to the others.

Formal guarantees:
  - The joint distribution of all weights that steps read, and of the weights after a
    flush, is that of noise added to every row at every step, for any learning rates (up
    to one rounding to the grid for each read, and half a millionth of a variance).
  - Noise and gradients of a row are added as integers.
  - No drawn value is used twice: a stream belongs to one block of rows of one (step,
    table) or one flush, and no row occurs twice in it.
  - Draws depend only on secret, step, table and block.
  - Weights are the same bits for any number of workers, and any split of a step.
  - ``flush`` completes every row; ``num_pending`` counts the rows that are not.
  - In a flush each block is drawn by one worker.  Workers take turns by chunks of
    blocks: with at least as many chunks as workers, each draws some.

Limitation.  The number of times that a weight is rounded to float32 between two flushes
follows from the number of its reads, and with a learning-rate schedule so does the
distance of its grid points.  The low bits of such a row therefore depend on more than
its sums, unlike those of other weights.

Public: which tables are lazy, and when they are flushed.  Sensitive: which rows are
pending, which follows from the batches; and tables that are not flushed.

References:
  Lim et al. (2024), arXiv:2404.08847, with the sum of squared learning rates instead of
  the number of steps, which makes schedules exact.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from trainer.claims.workers.agreement import Group
from trainer.core.run.withheld import withhold_values
from trainer.core.step import dp_step
from trainer.core.step.bounded_sum import StepSum
from trainer.core.step.noise import aligned, rounded
from trainer.core.step.workers import Alone, Workers
from trainer.core.tf_compat import tf
from trainer.gradients.proof import TableReads

#: Number of values of a block of noise (whole rows), which one worker draws.
_BLOCK = 1 << 15

#: Number of values rounded at a time, in a core's first cache.
_CHUNK = 1 << 12

#: Number of blocks of all tables that a worker completes at a time in a flush.
_FLUSH_BLOCKS = 1 << 6

#: Number of blocks drawn at a time; NumPy releases the interpreter lock meanwhile.
_DRAW_THREADS = 2

#: If fewer than one row in this many is read, sorting them is faster than a mask.
_SPARSE = 1 << 5

#: Largest root of the summed squared learning rates between two flushes, over the least
#: of these rates.  With the bound of ``step.grid`` on the noise of a step, integers
#: do not overflow; and a square adds to the sum up to a part in 2^21 of itself.
_MOST_RATIO = 1 << 16

#: (table, block, shape) -> noise of a block of rows, float64, with the standard
#: deviation of one step.  Blocks are numbered from 0 in each table.
DrawBlock = Callable[[int, int, Sequence[int]], np.ndarray]

#: (columns, weight) of a physical batch.
Batch = tuple[Mapping[str, Any], Any]


class LazyNoise:
    """Tables with lazy noise, and the state of their rows.

    Args:
      reads: The tables, and which of their rows a physical batch reads.
      bounded: Sum of the run, which has the grid and the divisor.
      workers: Workers that take the steps together; None for one.
    """

    def __init__(
        self, reads: TableReads, *, bounded: StepSum, workers: Workers | None = None
    ) -> None:
        if bounded.unit is None:
            raise InputError("Expected a grid, on which rows of lazy tables wait.")
        self.bounded = bounded
        self.tables = reads.tables
        self._workers: Workers = workers or Alone()
        self._step_size = np.float32(bounded.unit / bounded.divisor)
        self._unit = bounded.unit
        # Sums of squared learning rates since the last flush: over all steps, and over
        # those whose noise a row has.  In float64, for the sake of their differences.
        self._total = 0.0
        self._reached = [np.zeros(table.shape[0]) for table in self.tables]
        # This worker's pending integers of each row, and the learning rate of their
        # step; 0 where none are pending.
        self._sums = [aligned(t.shape, np.zeros) for t in self.tables]
        self._rates = [np.zeros(table.shape[0], np.float32) for table in self.tables]
        self._last_rate = np.float32(0)
        self._least_rate = math.inf
        # The rows that this step reads, the index of each among them, and its integers.
        self._just_read = self._no_rows()
        self._places = [_variable((t.shape[0],), tf.int32) for t in self.tables]
        self._new = [_variable((None, t.shape[1]), tf.int64) for t in self.tables]
        self._start = _start_of(self._places, self._new)
        self._ids = tf.function(reads.ids, autograph=False)
        self._subtract = _subtract_of(self.tables)
        self._assign = _assign_of(self.tables)

    @property
    def buffers(self) -> list[Any]:
        """The variables that each step fills anew.  Sensitive."""
        return [*self._places, *self._new]

    @property
    def num_pending(self) -> int:
        """Number of rows that lack noise.  Sensitive."""
        return sum(
            int(np.count_nonzero(reached != self._total)) for reached in self._reached
        )

    def complete_reads(self, batches: Sequence[Batch], draw: DrawBlock) -> None:
        """Completes the rows that any worker reads in a step, before the step.

        Args:
          batches: This worker's physical batches of the step.
          draw: Returns the noise of a block of the rows read, keyed by the step.
        """
        rows = self._rows_of_all(batches)
        # One vector: each exchange has a fixed cost, and each copy, too.
        values = aligned((self._num_values(rows),))
        units = self._parts(values, rows)
        for index, ids in enumerate(rows):
            _take(self._sums[index], ids, units[index])
            units[index][self._rates[index][ids] == 0] = 0
        share = slice(self._workers.rank, None, self._workers.count)
        sizes = self._add_noise(rows, units, draw, share=share)
        summed = self._parts(self._workers.sum(values), rows)
        self._subtract(rows, [*map(dp_step.tensor_of, summed)], sizes)
        for index, ids in enumerate(rows):
            self._reached[index][ids] = self._total
            self._rates[index][ids] = 0
        self._just_read = rows
        self._start(rows)

    def add(self, index: int, sums: Any) -> None:
        """Adds a physical batch's integers to the step's, within a ``tf.function``.

        Args:
          index: Index of the table.
          sums: Clipped sums in units of the grid, ``tf.IndexedSlices`` of int64 at rows
            that the step reads.
        """
        places = tf.gather(self._places[index], sums.indices)
        self._new[index].scatter_add(tf.IndexedSlices(sums.values, places))

    def count_step(self, learning_rate: Any) -> None:
        """Ends a step: its integers are pending, and all rows lack its noise.

        Args:
          learning_rate: Learning rate of the step, at least 0.

        Raises:
          InputError: learning rates since the last flush differ too much.
        """
        rate = np.float32(learning_rate)
        self._total += float(rate) ** 2
        if rate > 0:  # otherwise the step has no effect
            self._last_rate = rate
            self._least_rate = min(self._least_rate, float(rate))
            for index, ids in enumerate(self._just_read):
                new = self._new[index].read_value()
                self._sums[index][ids] = dp_step.array_of(new)
                self._rates[index][ids] = rate
        self._just_read = self._no_rows()
        if math.sqrt(self._total) > _MOST_RATIO * self._least_rate:
            raise InputError(
                f"Expected learning rates that differ by less than {_MOST_RATIO:,} "
                "times between two evaluations or checkpoints, for lazy noise. Take "
                "another schedule, or give --embedding-noise dense."
            )

    def flush(self, draw: DrawBlock) -> None:
        """Completes all rows; does nothing after a flush without steps in between.

        Args:
          draw: Returns the noise of a block of a table, keyed by the step of the flush.
        """
        if not self._total:
            return
        chunks = self._chunks()
        while some := [*itertools.islice(chunks, self._workers.count)]:
            self._flush_chunks(some, draw)
        self.forget()

    def forget(self) -> None:
        """Forgets all steps since the last flush, to whose weights a run goes back."""
        self._total, self._last_rate = 0.0, np.float32(0)
        self._least_rate = math.inf
        self._just_read = self._no_rows()
        for reached, rates in zip(self._reached, self._rates, strict=True):
            reached[:], rates[:] = 0, 0

    def _chunks(self) -> Iterator[list[np.ndarray]]:
        """Yields consecutive rows of each table, in whole blocks, to their end."""
        num_blocks = max(1, _FLUSH_BLOCKS // len(self.tables))
        sizes = [num_blocks * self._block_rows(i) for i in range(len(self.tables))]
        counts = [table.shape[0] for table in self.tables]
        for chunk in range(max(map(_ceil, counts, sizes))):
            yield [
                np.arange(min(chunk * size, count), min((chunk + 1) * size, count))
                for count, size in zip(counts, sizes, strict=True)
            ]

    def _flush_chunks(self, chunks: list[list[np.ndarray]], draw: DrawBlock) -> None:
        """Completes one chunk at each worker, and exchanges the weights."""
        waiting = [
            [ids[rates[ids] > 0] for ids, rates in zip(rows, self._rates, strict=True)]
            for rows in chunks
        ]
        values = aligned((sum(map(self._num_values, waiting)),))
        sums = self._parts(values, *waiting)
        for place, ids in enumerate(itertools.chain(*waiting)):
            _take(self._sums[place % len(self.tables)], ids, sums[place])
        sums = self._parts(self._workers.sum(values), *waiting)
        rank, size = self._workers.rank, len(self.tables)
        mine: list[Any] = []
        if rank < len(chunks):
            of_mine = sums[rank * size :][:size]
            mine = self._flush_chunk(chunks[rank], waiting[rank], of_mine, draw)
        if self._workers.count > 1:
            self._share(chunks, [*map(dp_step.array_of, mine)])

    def _share(self, chunks: list[list[np.ndarray]], mine: list[np.ndarray]) -> None:
        """Sends the weights of each worker's chunk to the others."""
        # The sum of one worker's bits, as integers, and the others' zeros is exact.
        bits = np.zeros(_ceil(sum(map(self._num_values, chunks)), 2), np.int64)
        size = len(self.tables)
        places = self._parts(bits.view(np.float32), *chunks)
        for place, values in zip(
            places[self._workers.rank * size :], mine, strict=False
        ):
            place[:] = values
        weights = self._parts(self._workers.sum(bits).view(np.float32), *chunks)
        for other, rows in enumerate(chunks):
            if other != self._workers.rank:
                self._assign(rows, weights[other * size :][:size])

    def _flush_chunk(
        self,
        rows: list[np.ndarray],
        waiting: list[np.ndarray],
        sums: list[np.ndarray],
        draw: DrawBlock,
    ) -> list[Any]:
        """Completes consecutive rows of each table, and returns their weights.

        Args:
          rows: Rows of each table, in whole blocks.
          waiting: Those of the rows that have pending integers, by table.
          sums: Pending integers of these, summed over the workers.
          draw: Returns the noise of a block of a table.
        """
        units = []
        for ids, waits, of_table in zip(rows, waiting, sums, strict=True):
            units.append(aligned((len(ids), of_table.shape[1]), np.zeros))
            units[-1][waits - ids[:1]] = of_table
        sizes = self._add_noise(rows, units, draw, consecutive=True)
        return self._subtract(rows, [*map(dp_step.tensor_of, units)], sizes)

    def _block_rows(self, index: int) -> int:
        return max(1, _BLOCK // self.tables[index].shape[1])

    def _no_rows(self) -> list[np.ndarray]:
        return [np.zeros(0, np.int64) for _ in self.tables]

    def _rows_of_all(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """Returns the sorted rows that any worker reads in a step, by table."""

        def of_batches() -> list[np.ndarray]:
            found = [[ids.numpy() for ids in self._ids(*batch)] for batch in batches]
            return self._distinct(found)

        # The graph is the user's, and may refuse a value at one worker alone.
        read = self._workers.together(withhold_values(of_batches))
        if not isinstance(self._workers, Group):
            return read
        counts = np.array([len(ids) for ids in read])
        found = self._workers.gather(np.concatenate([counts, *read]).tobytes())
        return self._distinct([self._parsed(one) for one in found])

    def _distinct(self, found: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Returns the sorted distinct rows, by table."""
        return [
            _distinct([ids[index] for ids in found], table.shape[0])
            for index, table in enumerate(self.tables)
        ]

    def _parsed(self, data: bytes) -> list[np.ndarray]:
        """Returns the rows that a worker sent, by table."""
        values = np.frombuffer(data, np.int64)
        counts, ids = np.split(values, [len(self.tables)])
        return np.split(ids, np.cumsum(counts)[:-1])

    def _num_values(self, rows: Sequence[np.ndarray]) -> int:
        """Returns the number of values in rows of each table."""
        return sum(
            len(ids) * table.shape[1]
            for ids, table in zip(rows, self.tables, strict=True)
        )

    def _parts(
        self, values: np.ndarray, *rows: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns views of a vector for rows of each table, (rows, size) each.

        Args:
          values: Values of the rows one after the other; more may follow.
          *rows: Rows of each table, for one or several chunks.
        """
        shapes = [
            (len(ids), table.shape[1])
            for some in rows
            for ids, table in zip(some, self.tables, strict=True)
        ]
        ends = np.cumsum([*map(math.prod, shapes)])
        return [*map(np.reshape, np.split(values, ends), shapes)]

    def _add_noise(
        self,
        rows: Sequence[np.ndarray],
        units: Sequence[np.ndarray],
        draw: DrawBlock,
        *,
        share: slice = slice(None),
        consecutive: bool = False,
    ) -> list[np.ndarray]:
        """Adds the noise that rows of each table lack to their integers.

        Args:
          rows: Distinct rows of each table.
          units: Integers of the rows, changed in place.
          draw: Returns the noise of a block.
          share: Blocks that this worker draws.
          consecutive: Whether blocks are numbered in the table, not in ``rows``.

        Returns:
          Change of a weight by one unit, float32, for each row of each table.
        """
        sizes, blocks = [], []
        for index, ids in enumerate(rows):
            waits = self._rates[index][ids]
            # Without pending integers any rate is right, if all workers use the same.
            rates = np.where(waits > 0, waits, self._last_rate)
            sizes.append(rates * self._step_size)
            factors = self._noise_factors(index, ids, rates)
            step = self._block_rows(index)
            first = int(ids[0]) // step if consecutive and len(ids) else 0
            for start in range(0, len(ids), step):
                part = slice(start, start + step)
                place = index, first + start // step
                blocks.append((place, units[index][part], factors[part]))
        _draw_blocks(blocks[share], draw)
        return sizes

    def _noise_factors(
        self, index: int, ids: np.ndarray, rates: np.ndarray
    ) -> np.ndarray:
        """Returns for each row the factor of a step's noise that gives what it lacks.

        Args:
          index: Index of the table.
          ids: Rows of the table.
          rates: Learning rate of each row's integers.
        """
        lacked = np.sqrt(self._total - self._reached[index][ids])
        of_unit = rates.astype(np.float64) * self._unit
        return np.divide(lacked, of_unit, out=np.zeros(len(ids)), where=rates > 0)


def _draw_blocks(
    blocks: Sequence[tuple[tuple[int, int], np.ndarray, np.ndarray]], draw: DrawBlock
) -> None:
    """Adds noise to blocks, each ((table, index), integers, factor per row)."""

    def add(place: tuple[int, int], units: np.ndarray, factors: np.ndarray) -> None:
        _add_rounded(units, draw(*place, units.shape), factors)

    with concurrent.futures.ThreadPoolExecutor(_DRAW_THREADS) as pool:
        for _ in pool.map(lambda block: add(*block), blocks):
            pass  # raises the error of a thread


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _variable(shape: Sequence[int | None], dtype: Any) -> Any:
    start = tf.zeros([size or 0 for size in shape], dtype)
    return tf.Variable(start, trainable=False, shape=shape)


def _distinct(ids: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Returns the sorted distinct values of arrays, each in [0, num_rows)."""
    together = np.concatenate([np.zeros(0, np.int64), *ids])
    if together.size and not 0 <= together.min() <= together.max() < num_rows:
        raise IndexError  # where arrays of that size may not fit into memory
    if len(together) < num_rows // _SPARSE:
        return np.unique(together)
    mask = np.zeros(num_rows, bool)
    mask[together] = True
    return np.flatnonzero(mask)


def _take(sums: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Copies rows of ``sums`` to ``out``."""
    # With the default mode, NumPy copies through a buffer.
    np.take(sums, ids, axis=0, out=out, mode="clip")


def _add_rounded(units: np.ndarray, noise: np.ndarray, factors: np.ndarray) -> None:
    """Adds each row's noise times its factor to its integers; overwrites ``noise``."""
    size = max(1, _CHUNK // noise.shape[1])
    for start in range(0, len(units), size):
        rows = slice(start, start + size)
        noise[rows] *= factors[rows, None]
        units[rows] += rounded(noise[rows])


def _start_of(places: Sequence[Any], new: Sequence[Any]) -> Any:
    """Returns the function that gives rows of each table places for integers."""

    def start(rows: Sequence[Any]) -> None:
        for place, units, ids in zip(places, new, rows, strict=True):
            size = tf.shape(ids)[0]
            place.scatter_update(tf.IndexedSlices(tf.range(size), ids))
            units.assign(tf.zeros((size, units.shape[1]), tf.int64))

    signature = [_each(tf.int64, ((None,) for _ in new))]
    return tf.function(start, input_signature=signature, autograph=False)


def _subtract_of(tables: Sequence[Any]) -> Any:
    """Returns the function that subtracts each row's integers times its step size.

    It returns the new weights of the rows.
    """

    def subtract(rows: Any, units: Any, sizes: Any) -> list[Any]:
        found = []
        for table, *of_table in zip(tables, rows, units, sizes, strict=True):
            ids, unit, size = of_table
            change = tf.cast(unit, tf.float32) * tf.expand_dims(size, 1)
            found.append(tf.gather(table, ids) - change)
            table.scatter_update(tf.IndexedSlices(found[-1], ids))
        return found

    signature = [
        _each(tf.int64, ((None,) for _ in tables)),
        _each(tf.int64, ((None, table.shape[1]) for table in tables)),
        _each(tf.float32, ((None,) for _ in tables)),
    ]
    return tf.function(subtract, input_signature=signature, autograph=False)


def _assign_of(tables: Sequence[Any]) -> Any:
    """Returns the function that assigns weights to rows of each table."""

    def assign(rows: Any, weights: Any) -> None:
        for table, ids, values in zip(tables, rows, weights, strict=True):
            table.scatter_update(tf.IndexedSlices(values, ids))

    signature = [
        _each(tf.int64, ((None,) for _ in tables)),
        _each(tf.float32, ((None, table.shape[1]) for table in tables)),
    ]
    return tf.function(assign, input_signature=signature, autograph=False)


def _each(dtype: Any, shapes: Iterable[Sequence[int | None]]) -> list[Any]:
    return [tf.TensorSpec(shape, dtype) for shape in shapes]
