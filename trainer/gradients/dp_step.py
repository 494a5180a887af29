"""One step of DP-SGD over any number of physical batches.

    theta <- optimizer(theta, (1 / b) * (noise + sum of clipped gradients))

A step of one physical batch is one call of TensorFlow.  In a step of several the sums
start at the noise and every batch adds to them: so noise is added once by construction,
however many batches a step has, and also when all of its rows are padding.

Tables with lazy noise (see ``lazy_noise``) get their noise before their rows are read,
and their gradients as rows: no step touches the rest of them.

Formal guarantees:
  - The noise enters exactly once per step.
  - The divisor is the constant ``expected_batch_size``, whatever the step holds.
  - The optimizer counts every step, so that a learning-rate schedule goes on, also in
    a model whose variables are all lazy tables.
  - Batches of a step may arrive in any split; only the sum of their gradients counts,
    and all of them see the weights from before the step.
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

from accounting.validation import check_int
from trainer.gradients.clipping import GradientSum
from trainer.gradients.lazy_noise import LazyNoise
from trainer.gradients.noise import LaterNoise
from trainer.tf_compat import tf


class Step:
    """Runs steps: ``begin(noise)``, ``add(columns, weight)`` any times, ``finish()``.

    Args:
      variables: The trainable variables.
      gradient_sum: From ``clipping``; its outputs match ``variables``.
      optimizer: Any Keras optimizer; plain SGD with lazy noise.
      expected_batch_size: The plan's constant divisor.
      lazy: The tables with lazy noise; None for none.
      autograph: Whether ``gradient_sum`` needs AutoGraph; compiling takes longer then.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        gradient_sum: GradientSum,
        optimizer: Any,
        *,
        expected_batch_size: int,
        lazy: LazyNoise | None = None,
        autograph: bool = False,
    ) -> None:
        check_int("expected_batch_size", expected_batch_size, at_least=1)
        self._variables = list(variables)
        self._gradient_sum = gradient_sum
        self._optimizer = optimizer
        self._divisor = float(expected_batch_size)
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
        noise = [tf.TensorSpec(shape, tf.float32) for shape in self.shapes]
        return self._whole.get_concrete_function(dict(columns), weight, noise)

    def begin(
        self, noise: Sequence[np.ndarray], later: LaterNoise | None = None
    ) -> None:
        """Starts a step with its noise.  Sensitive.

        Args:
          noise: An array of ``shapes`` for each variable.
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
        if self._held is not None and not self._num_added:
            self._whole(*self._held, self._noise)
        else:
            self._add_held()
            self._close()
        self._held = None

    def _add_held(self) -> None:
        if not self._totals:
            self._totals = [
                (_RowsTotal if i in self._table_indexes else _DenseTotal)(variable)
                for i, variable in enumerate(self._variables)
            ]
        if not self._num_added:
            for total, noise in zip(self._totals, self._noise, strict=True):
                total.start(noise)
        if self._held is not None:
            self._add(*self._held, self._rows_noise(self._num_added))
            self._num_added += 1

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
        gradients = self._gradients(columns, weight, rows_noise)
        for i in self._dense_indexes:
            gradients[i] = _plus(noise[i], gradients[i])
        self._apply(gradients)

    def _accumulate(
        self, columns: Mapping[str, Any], weight: Any, rows_noise: list[Any]
    ) -> None:
        gradients = self._gradients(columns, weight, rows_noise)
        for total, gradient in zip(self._totals, gradients, strict=True):
            total.add(gradient)

    def _apply_sums(self) -> None:
        self._apply([total.take() for total in self._totals])

    def _gradients(
        self, columns: Mapping[str, Any], weight: Any, rows_noise: list[Any]
    ) -> list[Any]:
        if self._lazy is not None:
            self._lazy.complete_read(columns, weight, rows_noise)
        return list(self._gradient_sum(columns, weight))

    def _apply(self, gradients: list[Any]) -> None:
        updates = [
            (gradients[i] / self._divisor, self._variables[i])
            for i in self._dense_indexes
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
            rows = gradients[i]
            change = tf.IndexedSlices(
                rows.values * (rate / self._divisor), rows.indices
            )
            self._variables[i].scatter_sub(change)
        self._lazy.count_step(rate)


def _plus(noise: Any, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        indices = tf.expand_dims(gradient.indices, 1)
        return tf.tensor_scatter_nd_add(noise, indices, gradient.values)
    return noise + gradient


class _DenseTotal:
    """The sum of a variable's gradients, which starts at its noise.  Sensitive."""

    def __init__(self, variable: Any) -> None:
        self._total = tf.Variable(tf.zeros_like(variable), trainable=False)

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
