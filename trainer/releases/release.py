"""One Gaussian release of several sums over the same rows.

Formal guarantees:
  - the sums together are one Gaussian mechanism with ``noise_multiplier``: each has
    noise of its bound times that over the root of its share, and shares add up to 1 at
    most.  It is (epsilon, delta)-private for one unit under zero-out by Balle and Wang
    (2018), Theorem 8.
  - of a sum with a threshold only what is above it, and where, is released.
  - noise is added to integers and rounded to integers, which is post-processing, so
    that no low bits of a float are released.
  - noise has a key of its own, from the operating system, that is kept nowhere: two
    releases have independent noise.

Public: what `release` returns.  Sensitive: the sums.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping

import numpy as np

from pipelines.core.keys import KEY_BYTES
from trainer.core.step.noise import grid_normal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSum:
    """A sum over rows.

    Attributes:
      values: int64.  Sensitive.
      bound: By how much one unit, a row or a user, moves them at most, in L2 norm.
      share: Share of the squared sensitivity of all sums together.
      above: Values with noise are released above it alone: see `vocabularies`.
    """

    values: np.ndarray = dataclasses.field(repr=False)
    bound: float
    share: float
    above: float = -math.inf

    def stddev(self, noise_multiplier: float) -> float:
        """Returns the standard deviation of the noise of each value."""
        return noise_multiplier * self.bound / math.sqrt(self.share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A released sum.

    Attributes:
      values: float64.
      stddev: Standard deviation of the noise of each value.
      places: Indices of the values among those that have noise.
    """

    values: np.ndarray
    stddev: float
    places: np.ndarray


def release(sums: Mapping[str, RowSum], noise_multiplier: float) -> dict[str, NoisySum]:
    """Returns the sums with noise, by name.

    Args:
      sums: Sums over the same rows.  Sensitive.
      noise_multiplier: Noise standard deviation over the sensitivity of all together.

    Raises:
      ValueError: shares that add up to more than 1, or no noise.
    """
    if sum(each.share for each in sums.values()) > 1 or not noise_multiplier > 0:
        raise ValueError("Expected shares of at most 1 in all, and noise above 0.")
    key, found = secrets.token_bytes(KEY_BYTES), {}
    for index, (name, each) in enumerate(sums.items()):
        stddev = each.stddev(noise_multiplier)
        noise = grid_normal(key, 0, index, each.values.shape, stddev=stddev)
        values = (each.values + noise).astype(np.float64)
        places = np.flatnonzero(values > each.above)
        found[name] = NoisySum(values=values[places], stddev=stddev, places=places)
    return found
