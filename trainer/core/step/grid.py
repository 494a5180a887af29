"""The public grid of integers on which gradients are summed and noise is added.

    m = sum over physical batches of  trunc(S_j / unit)    S_j  clipped sum, float32
    k = round(N / unit)                                    N    noise, double precision
    g = float32(m + k) * (unit / b)

Sums of integers are the same bits in any order and on any number of workers.  What is
released, ``unit * (m + k)``, lies on a grid that does not depend on the examples.

Formal guarantees:
  - If one example changes the sums of clipped gradients by at most ``clip`` in L2 norm,
    it changes ``unit * m`` by at most ``l2_norm_clip``.
  - ``unit * (m + k)`` is a function of ``unit * m + N`` alone, for a Gaussian N:
    rounding to the grid is post-processing of the Gaussian mechanism.
  - No sum of integers overflows in any step of the plan.
  - Noise reaches every point of the grid within seven standard deviations, whatever the
    multiplier.  The sampler's doubles are thousands of times finer than the grid within
    three standard deviations, and at least as fine within seven.
  - The grid is a function of public values.  Its unit is a power of two, so that
    scaling to units is exact.

Proofs.  Write t for truncation towards zero to multiples of ``unit``; |t(a) - t(b)| <=
|a - b| + unit, and |t(a)| <= |a|.  An example is in one physical batch.  If its
gradient of a variable is added to others before truncation, it changes each of d
coordinates by at most what it added and one unit, in norm by ``clip + unit * sqrt(d)``,
which is ``l2_norm_clip``.  If a table's gradient comes as rows, each row belongs to one
example, which adds t of its gradient: no more than the gradient's norm.  A cap of
``clip / sqrt(p)`` on coordinates, p <= d, leaves |t| <= ``l2_norm_clip / sqrt(p)`` in
the same way.

Rounding to the nearest integer commutes with adding an integer (except for ties, which
have probability zero): m + round(N / unit) = round((unit * m + N) / unit).

A step of at most R examples has |m| <= 2 R C / unit, where the 2 covers the rounding of
float32, and |k| <= 13 z C / unit, since no value of NumPy's ziggurat exceeds 12.3.
C / unit < 2^(bits + 1), and bits <= 60 - log2(R + 16 z) keeps their sum below 2^62.

The ziggurat's values are at most 2^-50 apart up to 3.65 standard deviations, and at
most (2^-53 / 3.65) exp(3.65 (x - 3.65)) at x in the tail beyond.  bits <= 36 - log2(z)
makes a standard deviation at most 2^37 units.

Noise of bands (``noise``) has |W| <= 52 z C / unit, with z that of its normal values.
It gets bits <= 31 - log2(z): a standard deviation of at most 2^32 units, with which it
is computed without error, and |W| < 2^38.

Limits.  The sampler's doubles are not exactly Gaussian: the probability of a point of
the grid has a relative error of up to 1 in 8,000 (1 in 500,000 at z = 1), and more in
the tail.  Beyond seven standard deviations, where one value in 4e11 is, some points are
never drawn.  And a physical batch is summed in float32 before it is put on the grid:
the rounding error of that sum depends on the other examples and is not in ``clip``.

``AdaptiveClip`` follows a quantile of the gradients' norms, at no cost in privacy:

    r_i = ||g_i|| / C_t
    v_i = ( min(1, c / r_i) g_i / C_t ,  a * [r_i <= tau] )       tau, a <= c / sqrt(2)
    C_{t+1} = C_t * exp(gain * (quantile - noisy count / b))

The count of the gradients below the threshold is one more coordinate of the sum of a
step: it gets the same noise, on the same grid, and is released with it.  What a counted
gradient adds to this coordinate is room that it leaves within the clip.  An optimizer
gets the mean of the v_i, without the count: it never sees C_t, so that the noise of its
steps does not grow with the gradients, and one learning rate suits all of them.

Its formal guarantees:
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

Public: all of a grid; clips.  Sensitive: what is put on it; counts without noise.

References:
  Mironov (2012), CCS, for the attack on low bits; Balcer and Vadhan (2018),
  arXiv:1709.05396, for integers instead of doubles.
  Andrew et al. (2021), arXiv:1905.03871, for the update; the count within the clip
  instead of beside it is proven here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_float
from trainer.core.tf_compat import tf

#: Maximum bits of a clip norm in units: more than the 24 of a float32 significand.
_MOST_BITS = 30

#: Exponents of clip norms with which all values stay in the range of float32.  Squares
#: below 2^-126 may be flushed to zero: of fewer than 2^60 coordinates, the most for
#: which there is a grid, they add less than 2^-66 to a squared norm.
_EXPONENTS = range(-26, 61)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Multiples of a power of two.

    Attributes:
      exponent: Binary exponent of ``unit``.
      clip: Bound on the L2 norm of one example's gradient before truncation.
    """

    exponent: int
    clip: float

    @property
    def unit(self) -> float:
        """Distance of neighbouring points."""
        return math.ldexp(1.0, self.exponent)

    def on(self, gradient: Any) -> Any:
        """Returns a clipped sum in units, int64, truncated towards zero.  Sensitive.

        Args:
          gradient: Tensor, or ``tf.IndexedSlices`` each of whose values belongs to one
            example.
        """
        if isinstance(gradient, tf.IndexedSlices):
            values = self.on(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.cast(gradient * math.ldexp(1.0, -self.exponent), tf.int64)

    def mean(self, sums: Any, divisor: float) -> Any:
        """Returns sums over a constant, float32.

        Args:
          sums: int64 sums in units.
          divisor: Constant divisor, above 0.
        """
        return tf.cast(sums, tf.float32) * (self.unit / divisor)


def make(
    *,
    l2_norm_clip: float,
    noise_multiplier: float,
    num_values: int,
    most_examples: int,
    has_bands: bool = False,
) -> Grid:
    """Returns the grid of a run.

    Args:
      l2_norm_clip: C, the bound on the L2 norm of one example's gradient, above 0.
      noise_multiplier: z, the noise's standard deviation over C, at least 0.
      num_values: d, the number of values of all trainable variables.
      most_examples: R, the maximum number of examples in a step of the plan.
      has_bands: Whether the noise has bands; z is then that of its normal values.

    Raises:
      InputError: ``l2_norm_clip`` out of range, or no grid is fine enough for so many
        values, examples or so much noise.

    Example:
      >>> make(l2_norm_clip=1.0, noise_multiplier=1.0, num_values=1 << 20,
      ...      most_examples=100_000).exponent
      -30
    """
    exponent = math.frexp(l2_norm_clip)[1] - 1
    if exponent not in _EXPONENTS:
        raise InputError(
            f"Expected l2_norm_clip={l2_norm_clip!r} to be between 1.5e-8 and 1e18, "
            "for sums in float32. Scale the loss, and the clip with it."
        )
    of_noise = math.log2(max(1.0, noise_multiplier))
    of_sums = math.log2(most_examples + 16 * noise_multiplier)
    most = 31 if has_bands else 36
    bits = min(_MOST_BITS, math.floor(most - of_noise), math.floor(60 - of_sums))
    unit = math.ldexp(1.0, exponent - bits)
    clip = l2_norm_clip - unit * math.sqrt(num_values)
    if clip <= l2_norm_clip / 2:
        raise InputError(
            f"Expected noise_multiplier={noise_multiplier!r} and {most_examples:,} "
            f"examples in a step to leave a grid for {num_values:,} parameters: its "
            f"rounding would take half of the clip. Take less noise, a smaller model, "
            "or a lower --truncated-batch-size."
        )
    # TensorFlow clips by a float32: by one below.
    below = np.nextafter(np.float32(clip), np.float32(0))
    return Grid(exponent=exponent - bits, clip=float(below))


#: Clip norms, eighths of an octave apart, from 1/16 to 8.  In a plan whose number of
#: examples is an upper bound, the counted share of b may stay below any quantile: the
#: clip then ends at the last of these.
CLIPS = np.exp2(np.arange(-32, 25) / 8).astype(np.float32)

#: The clip of the first step is 1.
_FIRST = 32

#: tau and a, over c: a float32 whose square is below a half.
_THRESHOLD = float(np.float32(0.7071))

#: Shape of the count.
COUNT_SHAPE = (1,)

#: Positions between two clips, so that small changes add up, also in a million steps.
_FINE = 1 << 20

#: Largest change of the clip's logarithm for a share that is off by 1: in one step, as
#: in the paper, and in all steps of a run together.  The second bound keeps the clip of
#: a long run, and the noise, which is in units of the clip, from reaching their final
#: size while gradients are still small.
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
