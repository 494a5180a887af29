"""Tests whether the residuals of a release are the noise of the claimed mechanism.

An audit that knows the contents of every batch can subtract their contributions from
the released weights.  The residuals should be independent standard normal values, in
units of the claimed noise.  Each function here tests one property of them and returns a
``Check``.

These checks find far smaller faults than a lower bound on epsilon does, since they
average over all weights, while a bound tests for a single example.  They can refute
that the executed mechanism is the claimed one; they bound no epsilon themselves.

Formal guarantees, for independent standard normal residuals:
  - a check's ``p_value`` is at most ``p`` with probability at most ``p``, over all of
    its groups together (Bonferroni's bound).
  - A mean contribution within ``TOLERANCE`` clip norms of the expected one never
    counts against the mechanism: clipping rounds, on the private side.

References:
  Cochran (1934) for sums of squares; Dunn (1961) for Bonferroni's bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import signal, special

#: Allowed error of a contribution, in clip norms: far above float32's rounding.
TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """The test of one property of the residuals.

    Attributes:
      name: What is checked.
      p_value: Upper bound on the probability of so large a difference in any group.

    Example:
      >>> deviations("noise", squares=[25.0], counts=[100]).p_value < 1e-9
      True
    """

    name: str
    p_value: float


def deviations(name: str, squares: Any, counts: Any) -> Check:
    """Checks the standard deviation of each group of residuals.

    Args:
      name: What is checked.
      squares: Sum of the squared residuals of each group, any shape.
      counts: Number of residuals of each group, same shape; groups of 0 are left out.
    """
    squares, counts = _groups(squares, counts)
    below = special.chdtr(counts, squares)
    above = special.chdtrc(counts, squares)
    return _of_groups(name, 2 * np.minimum(below, above))


def contributions(name: str, totals: Any, counts: Any, noise: float) -> Check:
    """Checks that the residuals of each group have mean 0, up to ``TOLERANCE``.

    Args:
      name: What is checked.
      totals: Sum of the residuals of each group, any shape.
      counts: Number of residuals of each group, same shape; groups of 0 are left out.
      noise: Standard deviation of the claimed noise of a residual, in clip norms.
    """
    totals, counts = _groups(totals, counts)
    found = totals / counts * noise
    beyond = np.maximum(np.abs(found) - TOLERANCE, 0.0)
    return _of_groups(name, _two_sided(beyond * np.sqrt(counts) / noise))


def correlations(name: str, vectors: Sequence[NDArray[np.float64]]) -> Check:
    """Checks that no two vectors are correlated, place by place.

    Args:
      name: What is checked.
      vectors: Residuals, of any lengths; pairs are compared up to the shorter length.
    """
    values = np.zeros((len(vectors), max(map(len, vectors))))
    known = np.zeros_like(values)
    for row, vector in enumerate(vectors):
        values[row, : len(vector)] = vector
        known[row, : len(vector)] = 1.0
    pairs = np.triu_indices(len(vectors), 1)
    squares = (known @ (values**2).T)[pairs]  # the variances given the second one
    return _of_products(name, (values @ values.T)[pairs], squares)


def repetitions(
    name: str, left: NDArray[np.float64], right: NDArray[np.float64]
) -> Check:
    """Checks that two vectors are uncorrelated at every offset.

    Args:
      name: What is checked.
      left: Residuals, shape (n,).
      right: Other residuals, shape (m,).
    """
    products = signal.correlate(right, left, method="fft")
    squares = signal.correlate(right**2, np.ones_like(left), method="fft")
    # At the largest offsets few values overlap; their sums drown in the FFT's rounding.
    near = squares > len(left) / 100
    return _of_products(name, products[near], squares[near])


def _of_products(name: str, products: Any, squares: Any) -> Check:
    products, squares = _groups(products, squares)
    return _of_groups(name, _two_sided(products / np.sqrt(squares)))


def _groups(values: Any, sizes: Any) -> tuple[Any, Any]:
    """Returns the groups that are not empty, as flat arrays."""
    values = np.asarray(values, np.float64).ravel()
    sizes = np.asarray(sizes, np.float64).ravel()
    return values[sizes > 0], sizes[sizes > 0]


def _two_sided(z: Any) -> Any:
    return 2 * special.ndtr(-np.abs(z))


def _of_groups(name: str, p_values: Any) -> Check:
    least = float(np.min(p_values, initial=1.0))
    return Check(name=name, p_value=min(1.0, max(1, len(p_values)) * least))
