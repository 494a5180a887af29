"""One step of DP-SGD over any number of physical batches, on any number of workers.

    theta <- optimizer(theta, (1 / b) * (noise + sum of clipped gradients))

In a private run, the clipped sum of each physical batch is integers on a public grid
(see ``bounded_sum``), which each worker adds to its share of the noise.  The sum over
the workers is exact: all of them have the same integers and make the same update.  Sums
start at the noise: it is added once, however many batches a step has, whichever workers
compute them, and even if all rows are padding.  A step of one physical batch on one
worker is a single call of TensorFlow, which computes the same bits.

A row of a table with lazy noise (see ``lazy_noise``) receives its noise, and the
gradients of the step that last read it, just before it is read.  A step touches no
other rows of the table.

Formal guarantees:
  - The noise is added exactly once per step, and each coordinate has its own.
  - The divisor is the constant of the plan, whatever the batches contain.
  - Noise, grid and divisor come from one ``BoundedSum``, and from nowhere else.
  - The optimizer counts every step, also if all variables are lazy tables: a
    learning-rate schedule advances.
  - A step may be split into batches in any way: the sum of their gradients counts, and
    all are taken at the weights before the step.
  - With a grid, the weights are the same bits for any order of the batches and any
    number of workers, even if some workers have no batch of a step.
  - Memory does not depend on the number of batches of a step, except that with lazy
    tables the batches are held: the rows of all are completed before the first is used.
  - ``finish`` settles the step after each worker has computed everything that the
    values of its examples may make fail: no worker waits for one that such an error has
    ended.
  - Nothing is compiled after the first step of one batch and the first of several.

Public: the updated weights, which are the mechanism's output, except lazy tables that
were not flushed.  Sensitive: the sums.

References:
  Abadi et al. (2016), arXiv:1607.00133, Algorithm 1, with the divisor of
  Chua et al. (2024), arXiv:2411.04205.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accounting.core.validation import InputError
from trainer.core import claim_names
from trainer.core.step.bounded_sum import StepSum
from trainer.core.step.grid import COUNT_SHAPE
from trainer.core.step.noise import DrawStep, LaterNoise, NoiseStream
from trainer.core.step.workers import Alone, Workers
from trainer.core.tf_compat import raw_variable, tensor_of, tf

if TYPE_CHECKING:
    from trainer.claims.lazy_noise import LazyNoise


def _call(compute: Callable[[], None]) -> None:
    compute()


class Step:
    """Runs steps: ``begin``, ``add`` for each physical batch, ``finish``.

    Args:
      variables: Trainable variables, of Keras or TensorFlow.
      bounded: ``BoundedSum`` with a gradient for each of ``variables``; unbounded
        without privacy.
      optimizer: Keras optimizer; plain SGD with lazy noise.
      lazy: Tables with lazy noise, of the same sum and workers; None for none.
      workers: Workers that take the step together; None for one.

    Raises:
      InputError: there are several workers or lazy tables, and the sum has no bound.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        bounded: StepSum,
        optimizer: Any,
        *,
        lazy: LazyNoise | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.workers: Workers = workers or Alone()
        _check_bounded(bounded, self.workers, lazy)
        self._variables = [raw_variable(variable) for variable in variables]
        # Keras's own have constraints, and names for weight decay.
        self._optimized = list(variables)
        self.bounded = bounded
        self._optimizer = optimizer
        self._lazy = lazy
        references = [variable.ref() for variable in self._variables]
        tables = lazy.tables if lazy is not None else ()
        self._table_indexes = [references.index(table.ref()) for table in tables]
        dense = [i for i in self._dense_indexes if i < len(self._variables)]
        optimizer.build([self._optimized[i] for i in dense])
        self._totals: list[_DenseTotal] = []
        self._batches: list[tuple[dict[str, Any], Any]] = []
        self._whole = tf.function(self._run, autograph=False)
        self._add = tf.function(self._accumulate, autograph=False)
        self._close = tf.function(self._apply_sums, autograph=False)

    @property
    def _dense_indexes(self) -> list[int]:
        lazy = set(self._table_indexes)
        num_values = len(self._variables) + (self.bounded.adaptive is not None)
        return [i for i in range(num_values) if i not in lazy]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each variable's noise, (0,) for lazy tables; and that of a count."""
        lazy = set(self._table_indexes)
        return [
            (0,) if i in lazy else shape for i, shape in enumerate(self._value_shapes)
        ]

    @property
    def _value_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each value of the sum."""
        count = [] if self.bounded.adaptive is None else [COUNT_SHAPE]
        return [*(tuple(one.shape) for one in self._variables), *count]

    @property
    def relies_on(self) -> tuple[str, ...]:
        """Names of the claims by which the step is private."""
        names = [*self.bounded.relies_on]
        names += [claim_names.LAZY_NOISE] if self._lazy is not None else []
        names += [claim_names.WORKERS] if self.workers.count > 1 else []
        return claim_names.check(names)

    def noise(
        self, secret: bytes, steps: range, draw: DrawStep | None = None
    ) -> NoiseStream:
        """Returns the noise of steps, this worker's share, for ``begin``.

        Args:
          secret: Secret of the attempt.  Sensitive.
          steps: Steps of the run, in order.
          draw: Draws further arrays of a step; None for none.
        """
        return NoiseStream(
            secret,
            steps=steps,
            shapes=self.shapes,
            noise_stddev=self.bounded.noise_stddev,
            unit=self.bounded.unit,
            share=(self.workers.rank, self.workers.count),
            draw=draw,
            bands=self.bounded.bands,
        )

    def later_noise(self, secret: bytes, step: int) -> LaterNoise:
        """Returns the noise of lazy tables in a step, or in a flush before it.

        Args:
          secret: Secret of the attempt.  Sensitive.
          step: Step of the run, from 0.
        """
        stddev = self.bounded.noise_stddev
        return LaterNoise(secret=secret, step=step, noise_stddev=stddev)

    @property
    def num_traces(self) -> int:
        """Number of times that TensorFlow compiled a part of the step."""
        functions = (self._whole, self._add, self._close)
        return sum(f.experimental_get_tracing_count() for f in functions)

    def traced(self, columns: Mapping[str, Any], weight: Any) -> Any:
        """Compiles the step of one batch, which later steps use, and returns it.

        Args:
          columns: ``tf.TensorSpec`` of each column of a physical batch, by name.
          weight: ``tf.TensorSpec`` of its weights.
        """
        noise = [tf.TensorSpec(shape, self.bounded.dtype) for shape in self.shapes]
        return self._whole.get_concrete_function(dict(columns), weight, noise)

    def begin(
        self, noise: Sequence[np.ndarray], later: LaterNoise | None = None
    ) -> None:
        """Starts a step with its noise.  Sensitive.

        Args:
          noise: An array per value, of ``shapes`` and of the type of ``bounded``.
            One of several workers gives its share.  The caller may not change them.
          later: Source of the noise of lazy tables.

        Raises:
          InputError: the noise is of another step: it would be repeated to fit.
        """
        shapes, found = self.shapes, [tuple(one.shape) for one in noise]
        dense = self._dense_indexes
        if len(found) != len(shapes) or any(found[i] != shapes[i] for i in dense):
            raise InputError(
                "Expected noise for each trainable weight; there are others than when "
                "it was drawn. Change them, and compile, between two calls of fit."
            )
        self._noise, self._later = [*map(tensor_of, noise)], later
        self._batches.clear()
        self._num_added = 0
        self._held: tuple[dict[str, Any], Any] | None = None

    def add(self, columns: Mapping[str, Any], weight: Any) -> None:
        """Adds the gradients of one physical batch.  Sensitive.

        Args:
          columns: Columns by name, each (batch, ...).
          weight: 1 for examples and 0 for padding, (batch,).
        """
        if self._lazy is not None:
            self._batches.append((dict(columns), weight))
        else:
            self._hold(dict(columns), weight)

    def _hold(self, columns: dict[str, Any], weight: Any) -> None:
        # The first batch waits: a step of one batch needs no variables for sums.
        if self._held is not None:
            self._add_held()
        self._held = columns, weight

    def finish(self, settle: Callable[[Callable[[], None]], Any] = _call) -> Any:
        """Updates the variables.

        Args:
          settle: Calls its argument, which computes what is left of this worker's sums,
            and raises an error unless all workers have theirs.

        Returns:
          What ``settle`` returned.
        """
        if self._lazy is not None:
            if self._later is None:
                raise ValueError("Expected LaterNoise for a step of lazy tables.")
            self._lazy.complete_reads(self._batches, self._later.of_read)
            # Before the update, after which a schedule gives the next step's.
            rate = np.float32(self._optimizer.learning_rate)
        settled = settle(self._compute)
        self._finish_sums()
        self._held = None
        if self._lazy is not None:
            self._lazy.count_step(rate)
        return settled

    def _compute(self) -> None:
        """Computes this worker's sums, before others wait for them."""
        for batch in self._batches:
            self._hold(*batch)
        if self.workers.count > 1:
            self._add_held()
            self._held = None

    def _finish_sums(self) -> None:
        alone = self.workers.count == 1
        if alone and self._held is not None and not self._num_added:
            self._whole(*self._held, self._noise)
            return
        if alone:
            self._add_held()
        else:
            self._sum_over_workers()
        self._close()

    def _add_held(self) -> None:
        if not self._totals:
            self._totals = [
                _DenseTotal(self._value_shapes[i], self.bounded.dtype)
                for i in self._dense_indexes
            ]
        if not self._num_added:
            for total, i in zip(self._totals, self._dense_indexes, strict=True):
                total.start(self._noise[i])
        if self._held is not None:
            self._add(*self._held)
            self._num_added += 1

    def _sum_over_workers(self) -> None:
        """Replaces the sums of this worker by those of all workers."""
        if not self._totals:
            return
        mine = [total.take().numpy() for total in self._totals]
        # One vector: each exchange has a fixed cost.
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
        """Returns the clipped sums of a physical batch, except those of lazy tables."""
        sums = list(self.bounded(columns, weight))
        if self._lazy is not None:
            for place, i in enumerate(self._table_indexes):
                self._lazy.add(place, sums[i])
        return [sums[i] for i in self._dense_indexes]

    def _apply(self, sums: list[Any]) -> None:
        count = None if self.bounded.adaptive is None else sums.pop()
        dense = self._dense_indexes[: len(sums)]
        updates = [
            (self.bounded.mean(total), self._optimized[i])
            for total, i in zip(sums, dense, strict=True)
        ]
        if updates:
            self._optimizer.apply_gradients(updates)
        else:
            # Keras does not count a step without gradients; schedules need the count.
            self._optimizer.iterations.assign_add(1)
        self.bounded.adapt(count)


def _check_bounded(bounded: StepSum, workers: Workers, lazy: LazyNoise | None) -> None:
    if bounded.bound is None and workers.count > 1:
        raise InputError(
            f"Expected a private method on {workers.count} workers: gradients without "
            "a clip have no bound, and so no integers that add up to the same bits "
            "everywhere. Train on one worker."
        )
    if lazy is not None and len(bounded.bands) > 1:
        raise InputError(
            f"Expected independent noise for lazy tables, whose rows wait for it; the "
            f"plan has bands={bounded.plan.bands}. Give --embedding-noise dense."
        )
    if lazy is not None and lazy.bounded is not bounded:
        raise InputError(
            "Expected lazy tables of the sum of the step, on whose grid their rows "
            "wait. Give both the same one."
        )


def _plus(noise: Any, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        indices = tf.expand_dims(gradient.indices, 1)
        return tf.tensor_scatter_nd_add(noise, indices, gradient.values)
    return noise + gradient


class _DenseTotal:
    """Sum of a variable's noise and gradients.  Sensitive."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._total = tf.Variable(tf.zeros(shape, dtype), trainable=False)

    def start(self, noise: Any) -> None:
        self._total.assign(noise)

    def add(self, gradient: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            self._total.scatter_add(gradient)
        else:
            self._total.assign_add(gradient)

    def take(self) -> Any:
        return tf.identity(self._total)
