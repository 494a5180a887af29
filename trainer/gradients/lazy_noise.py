"""Noise for rows of embedding tables when they are read, instead of at every step.

Under plain SGD the noise of a step is added to a weight, and nothing looks at it until
the weight is read.  A row that was last brought up to date when the squared learning
rates summed to ``s``, and is read when they sum to ``S``, lacks

    N(0, (S - s) (sigma C / b)^2),

the sum of the independent noise of the steps between.  It is added at once, just
before the row is read; a flush adds it to all rows.  So a step costs what the rows cost
that it reads, whatever the size of the table.

Formal guarantees:
  - The joint law of all weights that steps read, and of the weights after a flush, is
    that of noise added to every row at every step, for any learning rates.
  - No drawn value is used twice: a stream belongs to one (step, part, table), or to one
    chunk of one flush, and no row occurs twice in it.
  - What is drawn depends on key, step, part and table alone, and a flush on steps that
    are fixed beforehand: a replayed step is the same release.
  - ``flush`` leaves no row behind; ``num_pending`` counts those that are.
  - ``choose`` takes a table only where this holds: plain SGD without momentum, decay,
    clipping or constraint, rows that are known before any weight is read, and nothing
    but the steps that reads the table between two flushes.

Public: which tables are lazy, and when they are flushed.  Sensitive: which rows are
pending, since that follows from the batches; and a table that was not flushed.

References:
  Lim et al. (2024), arXiv:2404.08847.  The sum of squared learning rates in the place
  of their count makes schedules exact.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.validation import InputError
from pipelines.batches.manifest import Manifest
from trainer.gradients import clipping, ghost_clipping, traced_model
from trainer.gradients.traced_model import TableReads
from trainer.methods import registry
from trainer.model.trainable_model import TrainableModel
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.train_settings import DENSE_NOISE, LAZY_NOISE, TrainSettings
from trainer.tf_compat import keras, tf

#: Values that a flush draws at a time.
_FLUSH_CHUNK = 1 << 20

#: Chunks that are drawn at a time; NumPy draws without holding the interpreter.
_FLUSH_THREADS = 2

#: A table is lazy by itself if it has this many rows for each that a step may read.
_ROWS_PER_READ = 2

#: Values that steps draw between two flushes, for each value that a flush draws.
_DRAWS_PER_FLUSH_DRAW = 4

#: (table, chunk, shape) -> noise of a chunk of a table, of the deviation of a step's.
DrawChunk = Callable[[int, int, Sequence[int]], np.ndarray]


class LazyNoise:
    """The tables with lazy noise, and how much of it each row lacks.

    Args:
      reads: The tables, and which of their rows a physical batch reads.
      physical_batch_size: Rows of a physical batch, padding included.
      expected_batch_size: The plan's constant divisor.
    """

    def __init__(
        self, reads: TableReads, *, physical_batch_size: int, expected_batch_size: int
    ) -> None:
        self.tables = reads.tables
        self._reads = reads
        self._divisor = float(expected_batch_size)
        self._max_rows = [
            min(table.shape[0], count * physical_batch_size)
            for table, count in zip(reads.tables, reads.num_ids, strict=True)
        ]
        # Sums of squared learning rates since the last flush: of all steps, and of
        # those whose noise a row has.  Float64, since their differences matter.
        self._total = tf.Variable(tf.zeros((), tf.float64), trainable=False)
        self._reached = [
            tf.Variable(tf.zeros(table.shape[0], tf.float64), trainable=False)
            for table in reads.tables
        ]
        self._complete_range = tf.function(self._add_to_range, autograph=False)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shape of the noise that one physical batch needs, for each table."""
        return [
            (rows, table.shape[1])
            for rows, table in zip(self._max_rows, self.tables, strict=True)
        ]

    @property
    def num_pending(self) -> int:
        """Rows that lack noise.  Sensitive."""
        return sum(
            int(tf.math.count_nonzero(reached != self._total))
            for reached in self._reached
        )

    def complete_read(
        self, columns: Mapping[str, Any], weight: Any, noise: Sequence[Any]
    ) -> None:
        """Completes the rows that a physical batch reads; for a ``tf.function``.

        Args:
          columns: Of the batch.
          weight: Of the batch.
          noise: Values of ``shapes``, of the deviation of one step's noise.
        """
        for index, ids in enumerate(self._reads.ids(columns, weight)):
            rows, _ = tf.unique(ids)
            self._add(index, rows, noise[index][: tf.shape(rows)[0]])

    def count_step(self, learning_rate: Any) -> None:
        """Lets all rows lack the noise of one more step; for a ``tf.function``."""
        self._total.assign_add(tf.cast(learning_rate, tf.float64) ** 2)

    def flush(self, draw: DrawChunk) -> None:
        """Completes all rows; does nothing where they are.

        Args:
          draw: Gives the noise of a chunk, keyed by the step of this flush.
        """
        if not float(self._total):
            return
        for (index, _, start, _), values in _drawn_ahead(draw, self._chunks()):
            self._complete_range(index, tf.constant(start), values)
        self._total.assign(0.0)
        for reached in self._reached:
            reached.assign(tf.zeros_like(reached))

    def _chunks(self) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
        """Yields (table, chunk, first row, shape) of all chunks of all tables."""
        for index, table in enumerate(self.tables):
            num_rows, dim = table.shape
            size = max(1, _FLUSH_CHUNK // dim)
            for chunk, start in enumerate(range(0, num_rows, size)):
                yield index, chunk, start, (min(size, num_rows - start), dim)

    def _add_to_range(self, index: int, start: Any, noise: Any) -> None:
        self._add(index, start + tf.range(tf.shape(noise)[0]), noise)

    def _add(self, index: int, rows: Any, noise: Any) -> None:
        """Adds to distinct rows what they lack."""
        table, reached = self.tables[index], self._reached[index]
        total = tf.identity(self._total)
        lacked = tf.sqrt(total - tf.gather(reached, rows)) / self._divisor
        values = tf.expand_dims(tf.cast(lacked, table.dtype), 1) * noise
        table.scatter_sub(tf.IndexedSlices(values, rows))
        totals = tf.fill(tf.shape(rows), total)
        reached.scatter_update(tf.IndexedSlices(totals, rows))


def _drawn_ahead(draw: DrawChunk, chunks: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields every chunk with its noise, in order, while later ones are drawn."""
    with concurrent.futures.ThreadPoolExecutor(_FLUSH_THREADS) as pool:
        waiting: collections.deque[Any] = collections.deque()
        for chunk in chunks:
            index, number, _, shape = chunk
            waiting.append((chunk, pool.submit(draw, index, number, shape)))
            if len(waiting) > _FLUSH_THREADS:
                first, noise = waiting.popleft()
                yield first, noise.result()
        for first, noise in waiting:
            yield first, noise.result()


def is_plain_sgd(optimizer: Any) -> bool:
    """Whether a step moves a weight by its rate times its gradient and no more."""
    return type(optimizer) is keras.optimizers.SGD and not (
        optimizer.momentum
        or optimizer.weight_decay
        or optimizer.clipnorm
        or optimizer.clipvalue
        or optimizer.global_clipnorm
        or optimizer.use_ema
    )


def obstacle(
    model: TrainableModel, optimizer: Any, settings: TrainSettings
) -> str | None:
    """Returns why no table of this run can have lazy noise; None if some can."""
    reads = None
    if registry.choose_path(model, settings) == clipping.BOOKKEEPING:
        reads = traced_model.table_reads(model)
    if settings.lazy_obstacle is not None:
        return settings.lazy_obstacle
    if not is_plain_sgd(optimizer):
        return "the optimizer is not plain SGD"
    if reads is None or any(table.constraint is not None for table in reads.tables):
        return "the model has no Embedding whose rows are known before it is read"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlushSteps:
    """After which steps all rows are completed: fixed before the run, never by time.

    Attributes:
      every: Steps between flushes; 0 for those at evaluations alone.
      eval_steps: Steps between evaluations.
      kept_steps: Steps after which an iterate is kept.
      num_steps: Steps of the run.

    Example:
      >>> steps = FlushSteps(every=4, eval_steps=6, kept_steps=(7,), num_steps=13)
      >>> [step for step in range(1, 14) if steps.contain(step)]
      [4, 6, 7, 8, 12, 13]
    """

    every: int
    eval_steps: int
    kept_steps: tuple[int, ...]
    num_steps: int

    def contain(self, step: int) -> bool:
        """Whether rows are completed when ``step`` steps are done."""
        return (
            step % self.eval_steps == 0
            or step in self.kept_steps
            or step == self.num_steps
            or bool(self.every and step % self.every == 0)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which noise the tables of a run get.  Public.

    Attributes:
      reads: The tables with lazy noise; None for none.
      flush_every: Steps between flushes beside those at evaluations; 0 for none.
      message: What a user should know; empty for nothing.
    """

    reads: TableReads | None = None
    flush_every: int = 0
    message: str = ""


def choose(
    model: TrainableModel,
    optimizer: Any,
    settings: TrainSettings,
    *,
    manifest: Manifest,
    checkpoint_every: int | None,
) -> Choice:
    """Returns the noise of the tables of a run.

    Raises:
      InputError: ``settings`` ask for lazy noise where it would be another mechanism.
    """
    if settings.method == NON_PRIVATE or settings.embedding_noise == DENSE_NOISE:
        return Choice()
    found = obstacle(model, optimizer, settings)
    if settings.embedding_noise == LAZY_NOISE and found is not None:
        raise InputError(
            f"Expected --embedding-noise lazy only where it is exact; here {found}. "
            "Leave it away for dense noise."
        )
    parts = manifest.parts_per_step or _ceil(
        manifest.plan.expected_batch_size, manifest.physical_batch_size
    )
    step_rows = parts * manifest.physical_batch_size
    if found is not None:
        return Choice(message=_dense_message(model, step_rows, found))
    reads = traced_model.table_reads(model)
    assert reads is not None  # else there is an obstacle
    if settings.embedding_noise != LAZY_NOISE:
        reads = _worthwhile(reads, step_rows)
    if not reads.tables:
        return Choice()
    every = checkpoint_every or _flush_every(model, reads, step_rows)
    return Choice(
        reads=reads,
        flush_every=every,
        message=(
            f"embedding noise: lazy for {_num_values(reads.tables):,} values; all rows "
            f"are completed every {every} steps, and before anything but a step reads "
            "them"
        ),
    )


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _num_values(variables: Sequence[Any]) -> int:
    return sum(variable.shape.num_elements() for variable in variables)


def _worthwhile(reads: TableReads, step_rows: int) -> TableReads:
    """Returns the reads of tables of which a step reads a small part."""
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
    """Returns the steps between flushes that keep their cost a fraction of the steps'.

    It depends on shapes alone: a run that was killed flushes where it would have.
    """
    lazy = _num_values(reads.tables)
    read = sum(
        min(table.shape[0], count * step_rows) * table.shape[1]
        for table, count in zip(reads.tables, reads.num_ids, strict=True)
    )
    drawn = _num_values(model.variables) - lazy + read
    return max(1, _ceil(_DRAWS_PER_FLUSH_DRAW * lazy, drawn))


def _dense_message(model: TrainableModel, step_rows: int, found: str) -> str:
    reads = traced_model.table_reads(model) if ghost_clipping.is_exact(model) else None
    large = _worthwhile(reads, step_rows).tables if reads is not None else ()
    if not large:
        return ""
    return (
        f"embedding noise: dense, {_num_values(large):,} values at every step, since "
        f"{found}"
    )
