"""NOT PRIVATE: the bias of clipping in each step, in magnitude and direction.

Let g_i be the gradients that a method clips, ``ghat`` their sum over a step, and
``gbar`` the sum after clipping and before noise:

    gbar = a ghat + c,    a = <gbar, ghat> / ||ghat||^2,    c orthogonal to ghat

The file has a line per step: ``a``, the bias in magnitude; ``||c|| / ||ghat||``, the
bias in direction; ``||gbar - ghat||`` over the expected batch size; the cosine of
``gbar`` and ``ghat``; and, for a method that takes gradients after an ascent, the
cosine of its ascent and of the gradient at the updated weights.  Noise adds no bias.

All are functions of the examples without noise, which epsilon does not cover.  They are
for research on public data, are computed only with a flag that says so, and are written
only to the run's private folder.

Formal guarantees:
  - Training does not depend on it.
  - After a resumed run the file holds each step once.

References:
  Knolle et al. (2023), arXiv:2308.12018, Theorem 1.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.batches.folder import PRIVATE_NAME
from pipelines.files.storage import write_atomically
from trainer.core.step.per_example import GradientSum
from trainer.settings.bias_settings import CLIPPING_BIAS_NAME, COLUMNS
from trainer.tf_compat import tf

_HEADER = ",".join(("step", *COLUMNS)) + "\n"

#: (columns, weight) -> sums over a physical batch of the gradients at the updated
#: weights, and of the directions of ascent.
AscentSums = Callable[[Mapping[str, Any], Any], tuple[list[Any], list[Any]]]


class NonPrivateClippingBias:
    """Writes the bias of clipping for every step of a run.  Not private.

    Args:
      run: Folder of the run.
      variables: Trainable variables.
      clipped: Sum of clipped gradients that the step uses.
      unclipped: The same sum with an infinite clip.
      ascent: Ascent of a method that has one; otherwise None.
      expected_batch_size: Divisor of the step.
      first_step: Number of steps that are done; later lines of the file are dropped.
    """

    def __init__(
        self,
        run: pathlib.Path,
        variables: Sequence[Any],
        *,
        clipped: GradientSum,
        unclipped: GradientSum,
        ascent: AscentSums | None = None,
        expected_batch_size: int,
        first_step: int,
    ) -> None:
        self._path = run / PRIVATE_NAME / CLIPPING_BIAS_NAME
        self._sums, self._ascent = (clipped, unclipped), ascent
        self._divisor = float(expected_batch_size)
        self._totals = [
            [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
            for _ in range(2 if ascent is None else 4)
        ]
        self._add = tf.function(self._accumulate, autograph=False)
        lines = self._path.read_text().splitlines(True) if self._path.exists() else []
        # A killed process may leave a line of a step that is repeated, or half a line.
        kept = "".join(lines[1 : first_step + 1])
        write_atomically(self._path, (_HEADER + kept).encode(), mode=0o600)

    def add(self, columns: Mapping[str, Any], weight: Any) -> None:
        """Adds the gradients of one physical batch, at the weights of the step.

        Args:
          columns: Columns by name, each (batch, ...).
          weight: 1 for examples and 0 for padding, (batch,).
        """
        self._add(dict(columns), weight)

    def finish(self, step: int) -> None:
        """Writes the line of ``step``, and resets the sums."""
        clipped, unclipped, *ascent = (
            np.concatenate([total.numpy().ravel() for total in totals], dtype="f8")
            for totals in self._totals
        )
        values = (
            *decompose(clipped, unclipped),
            float(np.linalg.norm(clipped - unclipped)) / self._divisor,
            cosine(clipped, unclipped),
            cosine(*ascent) if ascent else math.nan,
        )
        with self._path.open("a") as file:
            file.write(",".join([str(step), *(f"{v:.9g}" for v in values)]) + "\n")
        for total in (total for totals in self._totals for total in totals):
            total.assign(tf.zeros_like(total))

    def _accumulate(self, columns: Mapping[str, Any], weight: Any) -> None:
        found = [gradient_sum(columns, weight) for gradient_sum in self._sums]
        if self._ascent is not None:
            found += self._ascent(columns, weight)
        for totals, gradients in zip(self._totals, found, strict=True):
            for total, gradient in zip(totals, gradients, strict=True):
                total.assign_add(tf.convert_to_tensor(gradient))


def decompose(clipped: np.ndarray, unclipped: np.ndarray) -> tuple[float, float]:
    """Returns ``a`` and ``||c|| / ||ghat||``; 1 and 0 where ``ghat`` is 0.

    Args:
      clipped: Sum of the clipped gradients, ``gbar``, as one vector.
      unclipped: Sum of the same gradients without clipping, ``ghat``.

    Example:
      >>> decompose(np.array([1.0, 1.0]), np.array([2.0, 0.0]))
      (0.5, 0.5)
    """
    square = float(unclipped @ unclipped)
    if square == 0:
        return 1.0, 0.0
    magnitude = float(clipped @ unclipped) / square
    rest = np.linalg.norm(clipped - magnitude * unclipped)
    return magnitude, float(rest) / math.sqrt(square)


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Returns the cosine of the angle between two vectors; NaN if one is 0.

    Args:
      left: First vector.
      right: Second vector, of as many numbers.

    Example:
      >>> cosine(np.array([1.0, 0.0]), np.array([0.0, 2.0]))
      0.0
    """
    norms = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / norms if norms else math.nan
