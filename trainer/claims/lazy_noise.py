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
sum of all workers' integers, and draws some of the blocks of noise.  A flush does the
same for all rows, some at a time.

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
  - ``choose`` takes a table only under these conditions: plain SGD without momentum,
    decay or clipping, and no constraint of any weight; the rows of a step are known
    before any weight is read; and between two flushes only steps read the table.
  - Each block is drawn by one worker; workers take turns.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from trainer.claims.worker_group import Group
from trainer.core.run.redact_errors import redact_errors
from trainer.core.step.bounded_sum import StepSum
from trainer.core.step.noise import aligned, rounded
from trainer.core.step.workers import Alone, Workers
from trainer.core.tf_compat import array_of, keras, tensor_of, tf
from trainer.gradients.paths import ONE_PASS
from trainer.gradients.proof import TableReads, table_reads
from trainer.model.trainable_model import TrainableModel
from trainer.run import hooks
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.train_settings import DENSE_NOISE, LAZY_NOISE, TrainSettings

#: Number of values of a block of noise (whole rows), which one worker draws.
_BLOCK = 1 << 15

#: Number of values rounded at a time, in a core's first cache.
_CHUNK = 1 << 12

#: Number of blocks of all tables that are completed at a time in a flush.
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
        self._complete(rows, draw)
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
                self._sums[index][ids] = array_of(new)
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
        for rows in self._chunks():
            self._complete(rows, draw, are_consecutive=True)
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

    def _complete(
        self,
        rows: list[np.ndarray],
        draw: DrawBlock,
        *,
        are_consecutive: bool = False,
    ) -> None:
        """Adds pending integers and lacking noise to distinct rows of each table.

        Args:
          rows: Rows of each table, the same at all workers.
          draw: Returns the noise of a block of rows.
          are_consecutive: Whether the rows are whole blocks, numbered in the table; of
            other rows, blocks are numbered in ``rows``.
        """
        # One vector: each exchange has a fixed cost, and each copy, too.
        values = aligned((self._num_values(rows),))
        sizes, blocks = [], []
        for index, (ids, units) in enumerate(
            zip(rows, self._parts(values, rows), strict=True)
        ):
            # With the default mode, NumPy copies through a buffer.
            np.take(self._sums[index], ids, axis=0, out=units, mode="clip")
            waits = self._rates[index][ids]
            units[waits == 0] = 0
            # Without pending integers any rate is right, if all workers use the same.
            rates = np.where(waits > 0, waits, self._last_rate)
            sizes.append(rates * self._step_size)
            factors = self._noise_factors(index, ids, rates)
            step = self._block_rows(index)
            first = int(ids[0]) // step if are_consecutive and len(ids) else 0
            for start in range(0, len(ids), step):
                part = slice(start, start + step)
                place = index, first + start // step
                blocks.append((place, units[part], factors[part]))
        _draw_blocks(blocks[self._workers.rank :: self._workers.count], draw)
        summed = self._parts(self._workers.sum(values), rows)
        self._subtract(rows, [*map(tensor_of, summed)], sizes)
        for index, ids in enumerate(rows):
            self._reached[index][ids] = self._total
            self._rates[index][ids] = 0

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
        read = self._workers.together(redact_errors(of_batches))
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
        self, values: np.ndarray, rows: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns views of a vector for rows of each table, (rows, size) each.

        Args:
          values: Values of the rows one after the other.
          rows: Rows of each table.
        """
        shapes = [
            (len(ids), table.shape[1])
            for ids, table in zip(rows, self.tables, strict=True)
        ]
        ends = np.cumsum([*map(math.prod, shapes)])[:-1]
        return [*map(np.reshape, np.split(values, ends), shapes)]

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
    """Returns the function that subtracts each row's integers times its step size."""

    def subtract(rows: Any, units: Any, sizes: Any) -> None:
        for table, *of_table in zip(tables, rows, units, sizes, strict=True):
            ids, unit, size = of_table
            change = tf.cast(unit, tf.float32) * tf.expand_dims(size, 1)
            table.scatter_update(tf.IndexedSlices(tf.gather(table, ids) - change, ids))

    signature = [
        _each(tf.int64, ((None,) for _ in tables)),
        _each(tf.int64, ((None, table.shape[1]) for table in tables)),
        _each(tf.float32, ((None,) for _ in tables)),
    ]
    return tf.function(subtract, input_signature=signature, autograph=False)


def _each(dtype: Any, shapes: Iterator[Sequence[int | None]]) -> list[Any]:
    return [tf.TensorSpec(shape, dtype) for shape in shapes]


# -- which tables ------------------------------------------------------------------

#: Unless asked for, a table is lazy only with this many rows per row that a step reads.
_ROWS_PER_READ = 2

#: Values that steps draw between two flushes, per value that a flush draws.
_DRAWS_PER_FLUSH_DRAW = 16


def is_plain_sgd(optimizer: Any) -> bool:
    """Whether a step subtracts the learning rate times the gradient and no more."""
    return type(optimizer) is keras.optimizers.SGD and not (
        optimizer.momentum
        or optimizer.weight_decay
        or optimizer.clipnorm
        or optimizer.clipvalue
        or optimizer.global_clipnorm
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
        or optimizer.loss_scale_factor
    )


def _obstacle(
    reads: TableReads | None,
    optimizer: Any,
    settings: TrainSettings,
    model: TrainableModel,
) -> str | None:
    """Returns why no table of this run can have lazy noise; None if one can."""
    if settings.lazy_obstacle is not None:
        return settings.lazy_obstacle
    if not is_plain_sgd(optimizer):
        return "the optimizer is not plain SGD"
    if reads is None:
        return "the model has no Embedding whose rows are known before it is read"
    if model.prepare is not None:
        return "an augmentation may change which rows an example reads"
    # Of any weight: its function may read a table, of which rows lack noise.
    if any(one.constraint is not None for one in model.optimized):
        return "the model has a constraint, which may read or change other rows"
    return None


def choose(
    model: TrainableModel,
    optimizer: Any,
    settings: TrainSettings,
    *,
    manifest: Manifest,
) -> tuple[TableReads, int] | None:
    """Returns which tables of a run get lazy noise; None if all noise is dense.

    Args:
      model: A model that ``check_model`` accepted.
      optimizer: Optimizer of the run.
      settings: Settings of the run; ``embedding_noise`` is what the user asked for.
      manifest: Manifest of the batches.

    Returns:
      The tables, with the rows that a step reads; and steps that cost many times a
      flush.

    Raises:
      InputError: ``settings`` ask for lazy noise where it is not exact.
    """
    if settings.method == NON_PRIVATE or settings.embedding_noise == DENSE_NOISE:
        return None
    fast = hooks.choose_path(model, settings) == ONE_PASS
    reads = table_reads(model) if fast else None
    found = _obstacle(reads, optimizer, settings, model)
    if found is None and manifest.plan.bands is not None:
        found = f"rows of a table cannot wait for noise of {manifest.plan.bands} bands"
    is_asked = settings.embedding_noise == LAZY_NOISE
    if found is not None or reads is None:  # without reads there is an obstacle
        if is_asked:
            raise InputError(
                f"Expected --embedding-noise lazy only where it is exact; here {found}."
                " Omit it for dense noise."
            )
        return None
    parts = manifest.parts_per_step or _ceil(
        manifest.plan.expected_batch_size, manifest.physical_batch_size
    )
    step_rows = parts * manifest.physical_batch_size
    chosen = reads if is_asked else _worthwhile(reads, step_rows)
    if not chosen.tables:
        return None
    return chosen, _flush_every(model, chosen, step_rows)


def _num_values(variables: Sequence[Any]) -> int:
    return sum(variable.shape.num_elements() for variable in variables)


def _worthwhile(reads: TableReads, step_rows: int) -> TableReads:
    """Returns the reads of those tables of which a step reads a small part."""
    kept = [
        table.shape[0] >= _ROWS_PER_READ * count * step_rows
        for table, count in zip(reads.tables, reads.num_ids, strict=True)
    ]

    def ids(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        return list(itertools.compress(reads.ids(columns, weight), kept))

    return TableReads(
        tables=tuple(itertools.compress(reads.tables, kept)),
        num_ids=tuple(itertools.compress(reads.num_ids, kept)),
        ids=ids,
    )


def _flush_every(model: TrainableModel, reads: TableReads, step_rows: int) -> int:
    """Returns the steps between flushes, so that these cost a fraction of the steps."""
    lazy = _num_values(reads.tables)
    read = sum(
        min(table.shape[0], count * step_rows) * table.shape[1]
        for table, count in zip(reads.tables, reads.num_ids, strict=True)
    )
    drawn = _num_values(model.variables) - lazy + read
    return max(1, _ceil(_DRAWS_PER_FLUSH_DRAW * lazy, drawn))
