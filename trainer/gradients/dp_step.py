"""One step of DP-SGD over any number of physical batches, on any number of workers.

    theta <- optimizer(theta, (1 / b) * (noise + sum of clipped gradients))

Every worker puts the clipped sums of its physical batches on a public grid of integers
(see ``grid``) and adds them to its share of the noise; one exact sum over the workers
gives all of them the same integers, and so the same update.  The noise enters once by
construction, however many batches a step has and whoever takes them, also when all of
its rows are padding.  A step of one physical batch on one worker is one call of
TensorFlow, of the same operations.

Rows of tables with lazy noise (see ``lazy_noise``) get their noise, and the gradients
of the step that read them last, before they are read: no step touches other rows.

Formal guarantees:
  - The noise enters exactly once per step.
  - The divisor is the constant ``expected_batch_size``, whatever the step holds.
  - The optimizer counts every step, so that a learning-rate schedule goes on, also in
    a model whose variables are all lazy tables.
  - Batches of a step may arrive in any split; only the sum of their gradients counts,
    and all of them see the weights from before the step.
  - With a grid the weights are the same bits for any order of the batches and any
    number of workers, also where some have no batch of a step.
  - Memory does not depend on the number of batches of a step, but for the batches
    themselves with lazy tables: all of their rows are completed before the first.
  - After the first step of one batch, and the first of several, nothing is compiled.

Public: the updated weights (they are the mechanism's output), but for lazy tables that
were not flushed.  Sensitive: the sums.

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
from trainer.workers import tensor_memory
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
      lazy: The tables with lazy noise, on the same grid and workers; None for none.
      workers: Who take the step together.
      autograph: Whether ``gradient_sum`` needs AutoGraph; compiling takes longer then.

    Raises:
      InputError: several workers or lazy tables, and no grid.
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
        _check_grid(grid, self.workers, lazy)
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
        self._totals: list[_DenseTotal] = []
        self._batches: list[tuple[dict[str, Any], Any]] = []
        self._whole = tf.function(self._run, autograph=autograph)
        self._add = tf.function(self._accumulate, autograph=autograph)
        self._close = tf.function(self._apply_sums, autograph=False)

    @property
    def _dense_indexes(self) -> list[int]:
        lazy = set(self._table_indexes)
        return [i for i in range(len(self._variables)) if i not in lazy]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the noise of a step, for each variable; lazy tables need none."""
        lazy = set(self._table_indexes)
        return [
            (0,) if i in lazy else tuple(variable.shape)
            for i, variable in enumerate(self._variables)
        ]

    @property
    def units(self) -> list[float | None]:
        """Of the noise for each variable, the distance of the points of its grid."""
        unit = self._grid.unit if self._grid is not None else None
        return [unit] * len(self._variables)

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
            ``units``; of several workers, this one's share.  Not to be changed.
          later: Where lazy tables get theirs from.
        """
        self._noise, self._later = [*map(tensor_memory.tensor, noise)], later
        self._batches.clear()
        self._num_added = 0
        self._held: tuple[dict[str, Any], Any] | None = None

    def add(self, columns: Mapping[str, Any], weight: Any) -> None:
        """Adds the gradients of one physical batch.  Sensitive.

        Args:
          columns: Name -> (batch, ...).
          weight: 1 for rows, 0 for padding, shape (batch,).
        """
        if self._lazy is not None:
            self._batches.append((dict(columns), weight))
        else:
            self._hold(dict(columns), weight)

    def _hold(self, columns: dict[str, Any], weight: Any) -> None:
        # The first batch waits: if it is the only one, the step needs no sums.
        if self._held is not None:
            self._add_held()
        self._held = columns, weight

    def finish(self) -> None:
        """Updates the variables."""
        if self._lazy is not None:
            if self._later is None:
                raise ValueError("Expected LaterNoise for a step of lazy tables.")
            self._lazy.complete_reads(self._batches, self._later.of_read)
            for batch in self._batches:
                self._hold(*batch)
        self._finish_sums()
        self._held = None
        if self._lazy is not None:
            # The rate of the update above, schedules included.
            self._lazy.count_step(self._optimizer.learning_rate)

    def _finish_sums(self) -> None:
        alone = self.workers.count == 1
        if alone and self._held is not None and not self._num_added:
            self._whole(*self._held, self._noise)
            return
        self._add_held()
        if not alone:
            self._sum_over_workers()
        self._close()

    def _add_held(self) -> None:
        if not self._totals:
            dtype = tf.float32 if self._grid is None else tf.int64
            self._totals = [
                _DenseTotal(self._variables[i], dtype) for i in self._dense_indexes
            ]
        if not self._num_added:
            for total, i in zip(self._totals, self._dense_indexes, strict=True):
                total.start(self._noise[i])
        if self._held is not None:
            self._add(*self._held)
            self._num_added += 1

    def _sum_over_workers(self) -> None:
        """Puts the sums of all workers in the place of this one's."""
        if not self._totals:
            return
        mine = [total.take().numpy() for total in self._totals]
        # One vector: every exchange has its own cost.
        flat = self.workers.sum(np.concatenate([one.ravel() for one in mine]))
        ends = np.cumsum([one.size for one in mine])[:-1]
        for total, one, part in zip(
            self._totals, mine, np.split(flat, ends), strict=True
        ):
            total.start(part.reshape(one.shape))

    # -- compiled ------------------------------------------------------------------

    def _run(self, columns: Mapping[str, Any], weight: Any, noise: list[Any]) -> None:
        sums = self._dense_sums(columns, weight)
        noise = [noise[i] for i in self._dense_indexes]
        self._apply([_plus(n, s) for n, s in zip(noise, sums, strict=True)])

    def _accumulate(self, columns: Mapping[str, Any], weight: Any) -> None:
        sums = self._dense_sums(columns, weight)
        for total, gradient in zip(self._totals, sums, strict=True):
            total.add(gradient)

    def _apply_sums(self) -> None:
        self._apply([total.take() for total in self._totals])

    def _dense_sums(self, columns: Mapping[str, Any], weight: Any) -> list[Any]:
        """Returns the clipped sums of a physical batch; those of lazy tables wait."""
        sums = list(self._gradient_sum(columns, weight))
        if self._grid is not None:
            sums = [self._grid.on(one) for one in sums]
        if self._lazy is not None:
            for place, i in enumerate(self._table_indexes):
                self._lazy.add(place, sums[i])
        return [sums[i] for i in self._dense_indexes]

    def _apply(self, sums: list[Any]) -> None:
        updates = [
            (self._mean(total), self._variables[i])
            for total, i in zip(sums, self._dense_indexes, strict=True)
        ]
        self._optimizer.apply_gradients(updates)
        if not updates:
            # Keras counts no step without gradients, and the rate follows the count.
            self._optimizer.iterations.assign_add(1)

    def _mean(self, total: Any) -> Any:
        if self._grid is None:
            return total / self._divisor
        return self._grid.mean(total, self._divisor)


def _check_grid(grid: Grid | None, workers: Workers, lazy: LazyNoise | None) -> None:
    if grid is None and workers.count > 1:
        raise InputError(
            f"Expected a private method on {workers.count} workers: gradients without "
            "a clip have no bound, and so no integers that add up to the same bits "
            "everywhere. Train on one worker."
        )
    if grid is None and lazy is not None:
        raise InputError("Expected a grid, on which rows of lazy tables wait.")


def _plus(noise: Any, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        indices = tf.expand_dims(gradient.indices, 1)
        return tf.tensor_scatter_nd_add(noise, indices, gradient.values)
    return noise + gradient


class _DenseTotal:
    """The sum of a variable's gradients, which starts at its noise.  Sensitive."""

    def __init__(self, variable: Any, dtype: Any) -> None:
        self._total = tf.Variable(tf.zeros(variable.shape, dtype), trainable=False)

    def start(self, noise: Any) -> None:
        self._total.assign(noise)

    def add(self, gradient: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            self._total.scatter_add(gradient)
        else:
            self._total.assign_add(gradient)

    def take(self) -> Any:
        return tf.identity(self._total)
