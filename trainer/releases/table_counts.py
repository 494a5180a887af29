"""What statistics count of a table: in blocks of rows, on all cores.

    rows             rows, if their number is not public
    label            rows by class
    single, groups   rows by the value of a numeric column, in public bins

Bins are those of single precision with three bits of mantissa: eight for each power of
two from 2^-31 to 2^64, of each sign, and one for values below in magnitude; larger
values are in the last bin.  So no range is needed to make them.  Counts are kept of
single bins and of groups of 39 bins: the number of values up to a place is then a sum
of at most 40 counts, and not of 1,521.

Formal guarantees:
  - What is counted depends on the schema and on the columns of the table alone.
  - One row moves a sum by its ``bound`` at most, in L2 norm: it is in one cell of each.
    Every value, whatever it is, is in one bin and one group, or missing: zeroing out a
    row moves each of the two arrays of counts by 1 in L2 norm.  A user of at most k
    rows moves a sum by k times that.
  - Shares of all sums add up to 1 at most.
  - Quantiles are functions of released counts and of the public number of rows.
  - Memory does not depend on the number of rows: blocks are counted one by one.

Public: names, bins, bounds, shares.  Sensitive: values and counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipelines.core.threads import in_order, num_cores
from pipelines.inputs.parquet_blocks import Block, Dataset, read_table, table_columns
from pipelines.tables.kinds import COUNT, LABEL
from pipelines.tables.schema import Schema
from trainer.releases.held_out_sums import NoisySum, RowSum
from trainer.report.progress import Reporter

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
      stddev: Standard deviation of the noise of each count.
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
      present: Estimated number of rows with a value.
    """

    def __init__(self, single: NoisySum, groups: NoisySum, num_rows: float) -> None:
        self.missing = float(np.clip(single.values[-1], 0, num_rows))
        self.present = num_rows - self.missing
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

    def _place(self, share: float) -> int:
        place = int(np.searchsorted(self._ranks, share * self.present))
        return min(place, NUM_BINS - 1)


ROWS = "rows"
#: Shares of the squared sensitivity; columns have the rest, in equal parts.
_SHARES = {LABEL: 0.1, ROWS: 0.05}
#: Arrays of counts of a numeric column, and their lengths.
_PARTS = {"single": NUM_BINS + 1, "groups": NUM_GROUPS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """What is counted of a table.  Public.

    Attributes:
      ranges: Output -> name in the table, of numeric columns that nothing scales.
      num_classes: Number of classes of the label; 0 if the schema does not say.
      most: Largest number of rows of one user; None if the unit is a row.
    """

    ranges: dict[str, str]
    num_classes: int
    most: int | None = None

    @classmethod
    def of(cls, schema: Schema, most: int | None = None) -> Counted:
        """Returns what is counted of rows.

        Args:
          schema: The schema that the rows were prepared with.
          most: As the attribute.
        """
        firsts = {name: schema.outputs_of(name)[0] for name in schema.inputs}
        return cls(
            ranges={f.name: name for name, f in firsts.items() if f.role == COUNT},
            num_classes=schema.label.num_classes,
            most=most,
        )

    @property
    def sums(self) -> dict[str, RowSum]:
        """Name -> each sum, without rows."""
        most, classes = self.most or 1, self.num_classes
        sizes = {LABEL: classes, ROWS: int(bool(self.most))}
        found = {
            name: RowSum(
                values=np.zeros(size, np.int64), bound=most, share=_SHARES[name]
            )
            for name, size in sizes.items()
            if size
        }
        # A little less, so that all shares add up to 1 at most in floating point.
        rest = (1 - sum(each.share for each in found.values())) * (1 - 1e-12)
        each = rest / max(1, len(self.ranges))
        parts = {f"{part} {x}": n for x in self.ranges for part, n in _PARTS.items()}
        for name, size in parts.items():
            values = np.zeros(size, np.int64)
            found[name] = RowSum(values=values, bound=most, share=each / 2)
        return found


def count_rows(
    counted: Counted, dataset: Dataset, reporter: Reporter
) -> dict[str, RowSum]:
    """Returns all sums over the rows of a table.  Sensitive.

    Args:
      counted: What is counted.
      dataset: The rows.
      reporter: Receives progress, in cells.
    """
    wanted = {LABEL, *counted.ranges, *map(_indicator, counted.ranges)}
    columns = tuple(c for c in dataset.columns if c.name in wanted)
    names = [column.name for column in columns]

    def read(block: Block) -> dict[str, np.ndarray]:
        table = read_table(block, names, dataset.is_listed)
        return sums_of_rows(counted, table_columns(table, columns))

    total, threads, done = counted.sums, num_cores(), 0
    reporter.start(len(names) * dataset.num_rows, done=0)
    with ThreadPoolExecutor(threads) as pool:
        results = in_order(pool, read, dataset.blocks, 2 * threads)
        for block, found in zip(dataset.blocks, results, strict=True):
            for name, values in found.items():
                total[name].values[:] += values
            done += len(names) * block.num_rows
            reporter.advance(done)
    reporter.stop()
    return total


def sums_of_rows(
    counted: Counted, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the sums of some rows, by name.  Sensitive.

    Args:
      counted: What is counted.
      arrays: Columns of the rows, by name.
    """
    found = {}
    if counted.num_classes:
        last = counted.num_classes - 1
        labels = np.clip(arrays[LABEL].astype(np.int64), 0, last)
        found[LABEL] = np.bincount(labels, minlength=last + 1)
    if counted.most:
        found[ROWS] = np.array([len(next(iter(arrays.values())))])
    for name in counted.ranges:
        values = arrays[name]
        if _indicator(name) in arrays:  # it is 0 where it is missing
            values = np.where(arrays[_indicator(name)] > 0, np.nan, values)
        single = count_values(values)
        found |= {f"single {name}": single, f"groups {name}": in_groups(single)}
    return found


def _indicator(name: str) -> str:
    """Returns the column that says where one is missing, if there is one."""
    return f"{name}_missing"
