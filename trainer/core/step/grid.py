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

Public: all of a grid.  Sensitive: what is put on it.

References:
  Mironov (2012), CCS, for the attack on low bits; Balcer and Vadhan (2018),
  arXiv:1709.05396, for integers instead of doubles.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from accounting.core.validation import InputError
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
