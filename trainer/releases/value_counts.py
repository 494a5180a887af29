"""Counts of a column's values in public bins; quantiles and means from them.

Bins are those of single precision with three bits of mantissa: eight for each power of
two from 2^-31 to 2^64, of each sign, and one for values below in magnitude; larger
values are in the last bin.  So no range is needed to make them.  Counts are kept of
single bins and of groups of 39 of them: a number of values up to a place is then a sum
of at most 40 counts, and not of 1,521.

Formal guarantees:
  - every value, whatever it is, is in one bin and one group, or missing: zeroing out a
    row moves each of the two arrays of counts by 1 in L2 norm.
  - quantiles and means are functions of released counts and of the public number of
    rows.

Public: bins.  Sensitive: values and counts.
"""

from __future__ import annotations

import math

import numpy as np

from trainer.releases.release import NoisySum

#: Powers of two of the least magnitude that is not in the bin of 0, and of the first
#: that is too large: nanoseconds since 1970 are not.
_LEAST, _MOST = -31, 64
_PER_POWER = 8
#: Bins of one sign.
_SIDE = (_MOST - _LEAST) * _PER_POWER
NUM_BINS = 2 * _SIDE + 1
GROUP = 39
NUM_GROUPS = NUM_BINS // GROUP
assert NUM_GROUPS * GROUP == NUM_BINS
#: Bits of a float32 to the right of three bits of mantissa, and the first bin's others.
_SHIFT, _FIRST = 20, (127 + _LEAST) * _PER_POWER
_LARGEST = np.nextafter(np.float32(2.0**_MOST), np.float32(0))


def bins(values: np.ndarray) -> np.ndarray:
    """Returns the bin of each value, in order of size, and ``NUM_BINS`` if missing.

    Args:
      values: float32, (rows,); NaN if missing.

    Example:
      >>> bins(np.float32([-np.inf, 0.0, 1.0, 1.1, 1.2, np.inf])).tolist()
      [0, 760, 1009, 1009, 1010, 1520]
    """
    values = np.asarray(values, np.float32)
    missing = np.isnan(values)
    size = np.minimum(np.abs(np.where(missing, 0, values)), _LARGEST)
    place = (size.astype(np.float32).view(np.uint32) >> _SHIFT).astype(np.int64)
    place = np.maximum(place - _FIRST + 1, 0)  # 0 is the bin of 0
    found = _SIDE + np.where(values < 0, -place, place)
    return np.where(missing, NUM_BINS, found)


def _ends() -> tuple[np.ndarray, np.ndarray]:
    """Returns the least and the largest values of each bin."""
    steps = np.arange(_SIDE + 1)
    size = np.exp2(_LEAST + steps // _PER_POWER) * (1 + steps % _PER_POWER / _PER_POWER)
    low, high = size[:-1], size[1:]
    return (
        np.concatenate([-high[::-1], [0.0], low]),
        np.concatenate([-low[::-1], [0.0], high]),
    )


def count_values(values: np.ndarray) -> np.ndarray:
    """Returns the numbers of values in each bin, and missing.  Sensitive.

    Returns:
      int64, (``NUM_BINS + 1``,).

    Args:
      values: See `bins`.
    """
    return np.bincount(bins(values), minlength=NUM_BINS + 1)


def in_groups(single: np.ndarray) -> np.ndarray:
    """Returns the numbers of values in each group, from those in each bin."""
    return single[:-1].reshape(-1, GROUP).sum(1)


def noise_of_rank(stddev: float) -> float:
    """Returns the largest standard deviation of a number of values up to a place.

    Args:
      stddev: Of the noise of each count.
    """
    return stddev * math.sqrt(GROUP + 1)


class Quantiles:
    """Quantiles of a column.

    Args:
      single: Released counts of `count_values`.
      groups: Released counts of `in_groups`, with the same noise.
      num_rows: Number of rows.

    Attributes:
      missing: Estimated number of rows without a value.
      present: The number of the others.
    """

    def __init__(self, single: NoisySum, groups: NoisySum, num_rows: float) -> None:
        self.missing = float(np.clip(single.values[-1], 0, num_rows))
        self.present, self._stddev = num_rows - self.missing, single.stddev
        fine = single.values[:-1].reshape(NUM_GROUPS, GROUP)
        groups_up_to, up_to = np.cumsum(groups.values), np.cumsum(fine, axis=1)
        from_left = (groups_up_to - groups.values)[:, None] + up_to
        groups_behind = groups_up_to[-1] - groups_up_to
        behind = up_to[:, -1:] - up_to
        from_right = self.present - groups_behind[:, None] - behind
        # Either is a sum of noisy counts: the one of fewer of them is taken.
        place = np.arange(NUM_GROUPS)[:, None]
        terms = place + np.arange(1, GROUP + 1)
        from_left_is_less = 2 * terms <= NUM_GROUPS + GROUP
        self._rough = np.where(from_left_is_less, from_left, from_right).ravel()
        self._ranks = np.maximum.accumulate(self._rough)
        self._low, self._high = _ends()

    def low(self, share: float) -> float:
        """Returns a value below which are at most about this share of the values."""
        return float(self._low[self._place(share)])

    def high(self, share: float) -> float:
        """Returns a value up to which is at least about this share of the values."""
        return float(self._high[self._place(share)])

    def reaches(self, low: float, high: float) -> bool:
        """Returns whether bins tell values between two ends apart.

        They do not if both are in the bin of 0, or one is in a bin of what is too
        large.

        Args:
          low: From `low`.
          high: From `high`.
        """
        return low < high and self._low[0] < low and high < self._high[-1]

    def mean(self, low: float, high: float) -> tuple[float, float]:
        """Returns the mean, and the deviation of its noise plus what bins hide.

        Values beyond an end count as it, and others as the middle of their bin.  Each
        is off by half its bin at most, so that the mean is off by a standard deviation
        of the noise and the mean of these halves, or less.

        Args:
          low: Lower end, at most ``high``.
          high: Upper end.
        """
        present = max(1.0, self.present)
        up_to = self._rough / present
        ends = np.clip(np.concatenate([self._low[:1], self._high]), low, high)
        before = np.concatenate([[0.0], up_to[:-1]])
        # The mean is the upper end less the integral of the share of values below.
        found = high - float(np.sum(np.diff(ends) * (up_to + before) / 2))
        of_bins = float(np.sum(np.diff(ends) * np.abs(up_to - before) / 2))
        # Each share has the noise of a rank, and of the number of values.
        noise = (noise_of_rank(self._stddev) + self._stddev) / present
        return float(np.clip(found, low, high)), (high - low) * noise + of_bins

    def _place(self, share: float) -> int:
        place = int(np.searchsorted(self._ranks, share * self.present))
        return min(place, NUM_BINS - 1)
