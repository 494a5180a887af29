"""The public grid of integers on which gradients are summed and noise is added.

    m = sum over physical batches of  trunc(S_j / unit)    S_j  clipped sum, float32
    k = round(N / unit)                                    N    noise, double precision
    g = float32(m + k) * (unit / b)

Integers add up to the same bits in any order, on any number of workers, and what is
released, ``unit * (m + k)``, lies on a grid that no example moves.

Formal guarantees:
  - One example changes ``unit * m`` by at most ``l2_norm_clip`` in norm where it
    changes the sums of clipped gradients by at most ``clip``.
  - ``unit * (m + k)`` is a function of ``unit * m + N`` alone, for a Gaussian N: the
    grid takes nothing from the guarantee of the Gaussian mechanism.
  - No sum of integers overflows in any step of the plan.
  - Noise reaches every point of the grid within seven deviations, whatever the
    multiplier: the doubles of the sampler are thousands of times as close as the grid
    within three, and as close as it within seven.
  - The grid is a function of public values, and a power of two: scaling rounds nothing.

Proofs.  Write t for truncation towards zero to multiples of ``unit``; |t(a) - t(b)| <=
|a - b| + unit, and |t(a)| <= |a|.  An example is in one physical batch.  Where its part
of a variable is added to those of others before it is truncated, it changes each of d
coordinates by at most what it added and one unit, in norm ``clip + unit * sqrt(d)``,
which is ``l2_norm_clip``.  Where a table's gradient comes as rows, each row is of one
example: it adds t of what it had, which is no longer.  A cap on coordinates of
``clip / sqrt(p)``, p <= d, leaves |t| <= ``l2_norm_clip / sqrt(p)`` in the same way.

Rounding to the next integer moves with integers (but for ties, of probability zero), so
that m + round(N / unit) = round((unit * m + N) / unit).

A step of R examples at most has |m| <= 2 R C / unit, where the 2 covers the rounding of
float32, and |k| <= 13 z C / unit, since no value of NumPy's ziggurat is above 12.3.
C / unit < 2^(bits + 1), and bits <= 60 - log2(R + 16 z) leave both below 2^62.

The ziggurat gives multiples of at most 2^-50 up to 3.65 deviations; in the tail beyond,
of (2^-53 / 3.65) exp(3.65 (x - 3.65)).  bits <= 36 - log2(z) makes a deviation at most
2^37 units.

What remains.  The doubles of the sampler are not a true Gaussian: the probability of a
point of the grid is off by up to 1 in 8,000 of itself (1 in 500,000 at z = 1), by more
in the tail, and beyond seven deviations, where one value in 4e11 is, points are missed.
And a physical batch is summed in float32, before the grid: its rounding, which other
examples take part in, is not in ``clip``.

Public: all of a grid.  Sensitive: what is put on it.

References:
  Mironov (2012), CCS, for the attack on low bits; Balcer and Vadhan (2018),
  arXiv:1709.05396, for integers in its place.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from accounting.validation import InputError
from trainer.tf_compat import tf

#: Of a clip norm, on the grid: finer than float32, whose significands have 24.
_MOST_BITS = 30

#: Exponents of clip norms for which no value on the way leaves the range of float32.
_EXPONENTS = range(-60, 61)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Multiples of a power of two.

    Attributes:
      exponent: The grid is that of the multiples of 2 to this power.
      clip: What the norms of gradients are clipped to before they are put on the grid.
    """

    exponent: int
    clip: float

    @property
    def unit(self) -> float:
        """The distance of two points."""
        return math.ldexp(1.0, self.exponent)

    def on(self, gradient: Any) -> Any:
        """Returns a clipped sum in units, int64, truncated towards zero.  Sensitive.

        Args:
          gradient: A tensor, or ``tf.IndexedSlices`` of which each value is of one
            example.
        """
        if isinstance(gradient, tf.IndexedSlices):
            values = self.on(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.cast(gradient * math.ldexp(1.0, -self.exponent), tf.int64)

    def mean(self, sums: Any, divisor: float) -> Any:
        """Returns sums in units, over a constant, in float32.

        Args:
          sums: int64.
          divisor: Above 0.
        """
        return tf.cast(sums, tf.float32) * (self.unit / divisor)


def make(
    *,
    l2_norm_clip: float,
    noise_multiplier: float,
    num_values: int,
    most_examples: int,
) -> Grid:
    """Returns the grid of a run.

    Args:
      l2_norm_clip: Bound on the L2 norm of one example's gradient, above 0.
      noise_multiplier: Noise standard deviation over ``l2_norm_clip``.
      num_values: d, of all trainable variables.
      most_examples: R, of a step of the plan.

    Raises:
      InputError: no grid is fine enough for so many values, or so much noise.

    Example:
      >>> make(l2_norm_clip=1.0, noise_multiplier=1.0, num_values=1 << 20,
      ...      most_examples=100_000).exponent
      -30
    """
    exponent = math.frexp(l2_norm_clip)[1] - 1
    if exponent not in _EXPONENTS:
        raise InputError(
            f"Expected l2_norm_clip={l2_norm_clip!r} to be between 1e-18 and 1e18, for "
            "sums in float32. Scale the loss, and the clip with it."
        )
    of_noise = math.log2(max(1.0, noise_multiplier))
    of_sums = math.log2(most_examples + 16 * noise_multiplier)
    bits = min(_MOST_BITS, math.floor(36 - of_noise), math.floor(60 - of_sums))
    unit = math.ldexp(1.0, exponent - bits)
    clip = l2_norm_clip - unit * math.sqrt(num_values)
    if clip <= l2_norm_clip / 2:
        raise InputError(
            f"Expected noise_multiplier={noise_multiplier!r} and {most_examples:,} "
            f"examples in a step to leave a grid for {num_values:,} parameters: its "
            f"rounding would take half of the clip. Take less noise, a smaller model, "
            "or a lower --truncated-batch-size."
        )
    return Grid(exponent=exponent - bits, clip=_float32_below(clip))


def _float32_below(value: float) -> float:
    """Returns a float32 of at most ``value``: what TensorFlow clips by."""
    return float(np.nextafter(np.float32(value), np.float32(0)))
