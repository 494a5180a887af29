"""One step of DP-SGD over any number of physical batches, on any number of workers.

    theta <- optimizer(theta, (1 / b) * (noise + sum of clipped gradients))

Every worker puts the clipped sums of its physical batches on a public grid of integers
(see ``grid``) and adds them, from its share of the noise on; one exact sum over the
workers gives all of them the same integers, and so the same update.  The noise enters
once by construction, however many batches a step has and whoever takes them, also when
all of its rows are padding.  A step of one physical batch on one worker is one call of
TensorFlow, of the same operations.

Tables with lazy noise (see ``lazy_noise``) get their noise before their rows are read,
and their gradients as rows, in float32: no step touches the rest of them, and one
worker has to see all of their rows.

Formal guarantees:
  - The noise enters exactly once per step.
  - The divisor is the constant ``expected_batch_size``, whatever the step holds.
  - The optimizer counts every step, so that a learning-rate schedule goes on, also in
    a model whose variables are all lazy tables.
  - Batches of a step may arrive in any split; only the sum of their gradients counts,
    and all of them see the weights from before the step.
  - With a grid, and without lazy tables, the weights are the same bits for any order of
    the batches and any number of workers, also where some have no batch of a step.
  - Memory does not depend on the number of batches of a step.
  - After the first step of one batch, and the first of several, nothing is compiled.

Public: the updated weights (they are the mechanism's output), but for rows of lazy
tables that were not flushed.  Sensitive: the sums.

References:
  Abadi et al. (2016), arXiv:1607.00133, Algorithm 1, with the divisor of
  Chua et al. (2024), arXiv:2411.04205.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accounting.validation import InputError, check_int
from trainer.gradients.clipping import GradientSum
from trainer.gradients.lazy_noise import LazyNoise
from trainer.gradients.noise import LaterNoise
from trainer.tf_compat import tf
from trainer.workers.base import Alone, Workers
from trainer.workers.grid import Grid


class Step:
    """Runs steps: ``begin(noise)``, ``add(columns, weight)`` any times, ``finish()``.

    Args:
      variables: The trainable variables.
      gradient_sum: From ``clipping``; its outputs match ``variables``.  With a grid it
        clips to the grid's norm.
      optimizer: Any Keras optimizer; plain SGD with lazy noise.
      expected_batch_size: The plan's constant divisor.
      grid: Of a private run; None for sums in float32.
      lazy: The tables with lazy noise; None for none.
      workers: Who take the step together.
      autograph: Whether ``gradient_sum`` needs AutoGraph; compiling takes longer then.

    Raises:
      InputError: several workers, and no grid or lazy tables.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        gradient_sum: GradientSum,
        optimizer: Any,
        *,
        expected_batch_size: int,
        grid: Grid | None = None,
        lazy: LazyNoise | None = None,
        workers: Workers | None = None,
        autograph: bool = False,
    ) -> None:
        check_int("expected_batch_size", expected_batch_size, at_least=1)
        self.workers: Workers = workers or Alone()
        _check_workers(self.workers, grid, lazy)
        self._variables = list(variables)
        self._gradient_sum = gradient_sum
        self._optimizer = optimizer
        self._divisor = float(expected_batch_size)
        self._grid = grid
        self._lazy = lazy
        references = [variable.ref() for variable in self._variables]
        tables = lazy.tables if lazy is not None else ()
        self._table_indexes = [references.index(table.ref()) for table in tables]
        optimizer.build([self._variables[i] for i in self._dense_indexes])
        self._totals: list[_DenseTotal | _RowsTotal] = []
        self._whole = tf.function(self._run, autograph=autograph)
        self._add = tf.function(self._accumulate, autograph=autograph)
        self._close = tf.function(self._apply_sums, autograph=False)

    @property
    def _dense_indexes(self) -> list[int]:
        lazy = set(self._table_indexes)
        return [i for i in range(len(self._variables)) if i not in lazy]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the noise of a step of one batch, for each variable in order."""
        shapes = [tuple(variable.shape) for variable in self._variables]
        if self._lazy is not None:
            for i, shape in zip(self._table_indexes, self._lazy.shapes, strict=True):
                shapes[i] = shape
        return shapes

    @property
    def units(self) -> list[float | None]:
        """Of the noise for each variable, the distance of the points of its grid."""
        unit = self._grid.unit if self._grid is not None else None
        lazy = set(self._table_indexes)
        return [None if i in lazy else unit for i in range(len(self._variables))]

    @property
    def num_traces(self) -> int:
        """How often TensorFlow has compiled a part of the step."""
        functions = (self._whole, self._add, self._close)
        return sum(f.experimental_get_tracing_count() for f in functions)

    def traced(self, columns: Mapping[str, Any], weight: Any) -> Any:
        """Returns the compiled step of one batch, which the steps after this use.

        Args:
          columns: ``tf.TensorSpec`` of the columns of a physical batch.
          weight: That of its weights.
        """
        noise = [
            tf.TensorSpec(shape, tf.float32 if unit is None else tf.int64)
            for shape, unit in zip(self.shapes, self.units, strict=True)
        ]
        return self._whole.get_concrete_function(dict(columns), weight, noise)

    def begin(
        self, noise: Sequence[np.ndarray], later: LaterNoise | None = None
    ) -> None:
        """Starts a step with its noise.  Sensitive.

        Args:
          noise: An array of ``shapes`` for each variable, float32, or int64 in
            ``units``; of several workers, this one's share.
          later: Where lazy tables get the noise of further physical batches from.
        """
        self._noise, self._later = list(noise), later
        self._num_added = 0
        self._held: tuple[dict[str, Any], Any] | None = None

    def add(self, columns: Mapping[str, Any], weight: Any) -> None:
        """Adds the gradients of one physical batch.  Sensitive.

        Args:
          columns: Name -> (batch, ...).
          weight: 1 for rows, 0 for padding, shape (batch,).
        """
        # The first batch waits: if it is the only one, the step needs no sums.
        if self._held is not None:
            self._add_held()
        self._held = dict(columns), weight

    def finish(self) -> None:
        """Updates the variables."""
        alone = self.workers.count == 1
        if alone and self._held is not None and not self._num_added:
            self._whole(*self._held, self._noise)
        else:
            self._add_held()
            if not alone:
                self._sum_over_workers()
            self._close()
        self._held = None

    def _add_held(self) -> None:
        if not self._totals:
            self._totals = [self._make_total(i) for i in range(len(self._variables))]
        if not self._num_added:
            for total, noise in zip(self._totals, self._noise, strict=True):
                total.start(noise)
        if self._held is not None:
            self._add(*self._held, self._rows_noise(self._num_added))
            self._num_added += 1

    def _make_total(self, index: int) -> _DenseTotal | _RowsTotal:
        variable = self._variables[index]
        if index in self._table_indexes:
            return _RowsTotal(variable)
        return _DenseTotal(variable, variable.dtype if self._grid is None else tf.int64)

    def _sum_over_workers(self) -> None:
        """Puts the sums of all workers in the place of this one's."""
        mine = [total.take().numpy() for total in self._totals]
        # One vector: every exchange has its own cost.
        flat = self.workers.sum(np.concatenate([one.ravel() for one in mine]))
        ends = np.cumsum([one.size for one in mine])[:-1]
        for total, one, part in zip(
            self._totals, mine, np.split(flat, ends), strict=True
        ):
            total.start(part.reshape(one.shape))

    def _rows_noise(self, part: int) -> list[np.ndarray]:
        """Returns the noise for what one batch reads of the lazy tables."""
        if part == 0:
            return [self._noise[i] for i in self._table_indexes]
        if not self._table_indexes:
            return []
        if self._later is None:
            raise ValueError("Expected LaterNoise for a further batch of lazy tables.")
        later, shapes = self._later, self.shapes
        return [later.of_part(part, i, shapes[i]) for i in self._table_indexes]

    # -- compiled ------------------------------------------------------------------

    def _run(self, columns: Mapping[str, Any], weight: Any, noise: list[Any]) -> None:
        rows_noise = [noise[i] for i in self._table_indexes]
        sums = self._sums(columns, weight, rows_noise)
        for i in self._dense_indexes:
            sums[i] = _plus(noise[i], sums[i])
        self._apply(sums)

    def _accumulate(
        self, columns: Mapping[str, Any], weight: Any, rows_noise: list[Any]
    ) -> None:
        sums = self._sums(columns, weight, rows_noise)
        for total, gradient in zip(self._totals, sums, strict=True):
            total.add(gradient)

    def _apply_sums(self) -> None:
        self._apply([total.take() for total in self._totals])

    def _sums(
        self, columns: Mapping[str, Any], weight: Any, rows_noise: list[Any]
    ) -> list[Any]:
        """Returns the clipped sums of a physical batch, those with a grid on it."""
        if self._lazy is not None:
            self._lazy.complete_read(columns, weight, rows_noise)
        sums = list(self._gradient_sum(columns, weight))
        if self._grid is not None:
            for i in self._dense_indexes:
                sums[i] = self._grid.on(sums[i])
        return sums

    def _apply(self, sums: list[Any]) -> None:
        updates = [
            (self._mean(sums[i]), self._variables[i]) for i in self._dense_indexes
        ]
        self._optimizer.apply_gradients(updates)
        if self._lazy is None:
            return
        if not updates:
            # Keras counts no step without gradients, and the rate follows the count.
            self._optimizer.iterations.assign_add(1)
        # The rate of the update above, schedules included.
        rate = tf.cast(self._optimizer.learning_rate, tf.float32)
        for i in self._table_indexes:
            rows = sums[i]
            change = tf.IndexedSlices(
                rows.values * (rate / self._divisor), rows.indices
            )
            self._variables[i].scatter_sub(change)
        self._lazy.count_step(rate)

    def _mean(self, total: Any) -> Any:
        if self._grid is None:
            return total / self._divisor
        return self._grid.mean(total, self._divisor)


def _check_workers(workers: Workers, grid: Grid | None, lazy: LazyNoise | None) -> None:
    if workers.count == 1:
        return
    if grid is None:
        raise InputError(
            f"Expected a private method on {workers.count} workers: gradients without "
            "a clip have no bound, and so no integers that add up to the same bits "
            "everywhere. Train on one worker."
        )
    if lazy is not None:
        raise InputError(
            f"Expected no lazy noise on {workers.count} workers: a row gets its noise "
            "before it is read, and no worker sees what the others read. Give "
            "--embedding-noise dense, or train on one worker."
        )


def _plus(noise: Any, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        indices = tf.expand_dims(gradient.indices, 1)
        return tf.tensor_scatter_nd_add(noise, indices, gradient.values)
    return noise + gradient


class _DenseTotal:
    """The sum of a variable's gradients, which starts at its noise.  Sensitive."""

    def __init__(self, variable: Any, dtype: Any) -> None:
        self._total = tf.Variable(tf.zeros(variable.shape, dtype), trainable=False)

    def start(self, noise: np.ndarray) -> None:
        self._total.assign(noise)

    def add(self, gradient: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            self._total.scatter_add(gradient)
        else:
            self._total.assign_add(gradient)

    def take(self) -> Any:
        return tf.identity(self._total)


class _RowsTotal:
    """The sum of a table's gradients, of which only rows that are read matter.

    It is as large as the table, whatever the number of batches.  Sensitive.
    """

    def __init__(self, variable: Any) -> None:
        self._total = tf.Variable(tf.zeros_like(variable), trainable=False)
        self._used = tf.Variable(tf.zeros(variable.shape[0], tf.bool), trainable=False)

    def start(self, noise: np.ndarray) -> None:
        del noise  # rows get theirs when they are read

    def add(self, gradient: Any) -> None:
        self._total.scatter_add(gradient)
        used = tf.ones_like(gradient.indices, tf.bool)
        self._used.scatter_update(tf.IndexedSlices(used, gradient.indices))

    def take(self) -> Any:
        """Returns the rows, and forgets them."""
        rows = tf.where(self._used)[:, 0]
        values = tf.gather(self._total, rows)
        self._total.scatter_update(tf.IndexedSlices(tf.zeros_like(values), rows))
        used = tf.zeros_like(rows, tf.bool)
        self._used.scatter_update(tf.IndexedSlices(used, rows))
        return tf.IndexedSlices(values, rows)
