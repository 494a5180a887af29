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

Public: which tables are lazy, and when they are flushed.  Sensitive: which rows are
pending, since that follows from the batches; and a table that was not flushed.

References:
  Lim et al. (2024), arXiv:2404.08847.  The sum of squared learning rates in the place
  of their count makes schedules exact.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.gradients.traced_model import TableReads
from trainer.tf_compat import tf

#: Values that a flush draws at a time.
_FLUSH_CHUNK = 1 << 20

#: Chunks that are drawn at a time; NumPy draws without holding the interpreter.
_FLUSH_THREADS = 2

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
