"""A clip norm that follows a quantile of the gradients' norms, at no cost in privacy.

    r_i = ||g_i|| / C_t
    v_i = ( min(1, c / r_i) g_i / C_t ,  a * [r_i <= tau] )       tau, a <= c / sqrt(2)
    C_{t+1} = C_t * exp(gain * (quantile - noisy count / b))

The count of the gradients below the threshold is one more coordinate of the sum of a
step: it gets the same noise, on the same grid, and is released with it.  What a counted
gradient adds to this coordinate is room that it leaves within the clip.  An optimizer
gets the mean of the v_i, without the count: it never sees C_t, so that the noise of its
steps does not grow with the gradients, and one learning rate suits all of them.

Formal guarantees:
  - ``|v_i| <= c``, counted or not: the count leaves sensitivity, noise and epsilon as
    they are.
  - C_t is a function of the noisy counts of earlier steps and of public values.  The
    privacy of a step depends on its noise multiplier alone, not on C_t: DP-SGD's
    accounting, which lets a step depend on earlier releases, holds unchanged.
  - C_t is one of ``CLIPS``, and changes by a bounded factor per step, whatever the
    noise.
  - All of it is in one integer variable, which the step reads and writes, and a
    checkpoint holds: all workers have the same clips.

Proof of the first.  If r_i <= tau, nothing is clipped: |v_i|^2 = r_i^2 + a^2 <= tau^2 +
a^2 <= c^2.  Otherwise the count has 0, and the clipped gradient has at most c.  The
count is a whole number of units of the grid: rounding to the grid does not change it.

Public: clips.  Sensitive: counts without noise.

References:
  Andrew et al. (2021), arXiv:1905.03871, for the update; the count within the clip
  instead of beside it is proven here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import check_float
from trainer.core.step.grid import Grid
from trainer.core.tf_compat import tf

#: Clip norms, eighths of an octave apart, from 1/16 to 8.  In a plan whose number of
#: examples is an upper bound, the counted share of b may stay below any quantile: the
#: last clip is where it then ends.
CLIPS = np.exp2(np.arange(-32, 25) / 8).astype(np.float32)

#: The clip of the first step is 1.
_FIRST = 32

#: tau and a, over c: a float32 whose square is below a half.
_THRESHOLD = float(np.float32(0.7071))

#: Shape of the count.
COUNT_SHAPE = (1,)

#: Positions between two clips, so that small changes add up, also in a million steps.
_FINE = 1 << 20

#: Most change of the clip's logarithm for a share that is off by 1: in a step, as in
#: the paper, and in all steps of a run.  The latter keeps the clip of a long run from
#: its final size, and the noise, which is in units of it, from its, while gradients are
#: still small.
_MOST_GAIN = 0.2
_GAIN_OF_RUN = 15.0


class AdaptiveClip:
    """The clip norm of each step, and the count that it follows.

    Args:
      quantile: Share of the gradients that the threshold shall exceed, in [0.5, 1).

    Raises:
      InputError: the quantile is out of range.
    """

    def __init__(self, quantile: float) -> None:
        check_float("clip_quantile", quantile, at_least=0.5, below=1)
        self.quantile = quantile
        self._position = tf.Variable(_FIRST * _FINE, dtype=tf.int64, trainable=False)

    @property
    def norm(self) -> Any:
        """The clip norm of the step, a float32 scalar."""
        return tf.gather(CLIPS, self._position // _FINE)

    def counted(self, ratios: Any, kept: Any, clip: float) -> Any:
        """Returns the number of small gradients, int64 of ``COUNT_SHAPE``.  Sensitive.

        Args:
          ratios: Norms of the gradients over ``norm``, (batch,).
          kept: Rows that contribute, bool (batch,).
          clip: ``c``, the largest norm of a gradient over ``norm``.
        """
        small = kept & (ratios <= clip * _THRESHOLD)
        return tf.reshape(tf.math.count_nonzero(small), COUNT_SHAPE)

    def units(self, grid: Grid) -> int:
        """Returns ``a``, what one gradient adds to the count, in units of the grid."""
        return math.floor(grid.clip * _THRESHOLD / grid.unit)

    def adapt(self, count: Any, grid: Grid, plan: DpSgdPlan) -> None:
        """Sets the clip norm of the next step, within a ``tf.function``.

        Args:
          count: Noisy count of the step in units of the grid, int64 of ``COUNT_SHAPE``.
          grid: Grid of the run.
          plan: Plan of the run.
        """
        most = self.units(grid) * float(plan.expected_batch_size)
        wrong = self.quantile - tf.cast(count[0], tf.float64) / most
        gain = min(_MOST_GAIN, _GAIN_OF_RUN / plan.num_steps)
        change = tf.clip_by_value(wrong, -1.0, 1.0) * (gain / math.log(2) * 8 * _FINE)
        moved = self._position + tf.cast(tf.round(change), tf.int64)
        self._position.assign(tf.clip_by_value(moved, 0, len(CLIPS) * _FINE - 1))
