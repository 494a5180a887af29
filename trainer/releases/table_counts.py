"""What statistics count of a table: in blocks of rows, on all cores.

    rows             rows, if their number is not public
    label            rows by class
    missing          rows without a value, by column
    single, groups   rows by the value of a numeric column: see `value_counts`
    values           rows by the text of a column: see `vocabularies`

Formal guarantees:
  - what is counted depends on the schema and on the columns of the table alone.
  - one row moves a sum by its ``bound`` at most, in L2 norm: it is in one cell of each,
    and of ``missing`` in one for each column.  A user of at most k rows moves it by k
    times that.
  - shares of all sums add up to 1 at most; the parts of a column's ``values`` count
    once, since a row is in one of them.
  - memory does not depend on the number of rows: blocks are counted one by one, and of
    a column's distinct values one part at a time.

Public: names, bounds, shares.  Sensitive: values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.threads import in_order, num_cores
from pipelines.inputs.parquet_blocks import Block, Dataset, read_table, table_columns
from pipelines.tables.schema.column_kinds import COUNT, LABEL
from pipelines.tables.schema.schema import Schema
from trainer.releases.release import RowSum
from trainer.releases.value_counts import (
    NUM_BINS,
    NUM_GROUPS,
    count_values,
    in_groups,
)
from trainer.releases.vocabularies import count_texts, merged, num_parts
from trainer.report.progress import Reporter

ROWS, MISSING = "rows", "missing"
#: Shares of the squared sensitivity; columns have the rest, in equal parts.
_SHARES = {LABEL: 0.1, MISSING: 0.05, ROWS: 0.05}
#: Arrays of counts of a numeric column, and their lengths.
_PARTS = {"single": NUM_BINS + 1, "groups": NUM_GROUPS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """What is counted of a table.  Public.

    Attributes:
      ranges: Output -> name in the table, of numeric columns that nothing scales.
      texts: The same of categories whose values are not known.
      missing: The same of other inputs of which rows may have none.
      num_classes: Number of classes of the label; 0 if the schema does not say.
      most: Largest number of rows of one user; None if the unit is a row.
    """

    ranges: dict[str, str]
    texts: dict[str, str]
    missing: dict[str, str]
    num_classes: int
    most: int | None = None

    @classmethod
    def of(
        cls, schema: Schema, texts: Sequence[str] = (), most: int | None = None
    ) -> Counted:
        """Returns what is counted of rows.

        Args:
          schema: How they were prepared.
          texts: Columns that hold texts.
          most: As the attribute.
        """
        ranges, missing = dict[str, str](), dict[str, str]()
        for name in schema.inputs:
            outputs = schema.outputs_of(name)
            first, last = outputs[0], outputs[-1]
            if first.role == COUNT:
                ranges[first.name] = name
            elif not last.shape and (last.nullable or last.dtype != "float32"):
                missing[last.name] = name
        return cls(
            ranges=ranges,
            texts={name: schema.unlisted[name] for name in texts},
            missing=missing,
            num_classes=schema.label.num_classes,
            most=most,
        )

    @property
    def sums(self) -> dict[str, RowSum]:
        """Name -> each sum, without rows."""
        most, classes = self.most or 1, self.num_classes
        sizes = {LABEL: classes, MISSING: len(self.missing), ROWS: int(bool(self.most))}
        found = {
            name: RowSum(
                values=np.zeros(size, np.int64),
                bound=most * math.sqrt(size) if name == MISSING else most,
                share=_SHARES[name],
            )
            for name, size in sizes.items()
            if size
        }
        # A little less, so that all shares add up to 1 at most in floating point.
        rest = (1 - sum(each.share for each in found.values())) * (1 - 1e-12)
        each = rest / max(1, len(self.ranges) + len(self.texts))
        parts = {f"{part} {x}": n for x in self.ranges for part, n in _PARTS.items()}
        for name, size in parts.items():
            values = np.zeros(size, np.int64)
            found[name] = RowSum(values=values, bound=most, share=each / 2)
        for name in self.texts:
            values = np.zeros(0, np.int64)
            found[f"values {name}"] = RowSum(values=values, bound=most, share=each)
        return found


class Counting:
    """Counts the rows of a table.

    Args:
      counted: What is counted.
      dataset: The rows.
      reporter: Receives progress, in cells.
    """

    def __init__(self, counted: Counted, dataset: Dataset, reporter: Reporter) -> None:
        self._counted, self._dataset = counted, dataset
        self._reporter, self._done = reporter, 0
        self.num_parts = num_parts(dataset.num_examples)
        wanted = {
            LABEL,
            *counted.ranges,
            *counted.missing,
            *map(_indicator, counted.ranges),
        }
        self._columns = tuple(c for c in dataset.columns if c.name in wanted)

    def start(self) -> None:
        """Reports the number of cells."""
        of_texts = len(self._counted.texts) * (1 + self.num_parts)
        count = len(self._columns) + of_texts
        self._reporter.start(count * self._dataset.num_rows, done=0)

    def stop(self) -> None:
        """Reports the end."""
        self._reporter.stop()

    def known(self) -> dict[str, RowSum]:
        """Returns all sums but those of texts.  Sensitive."""
        total = {
            n: s for n, s in self._counted.sums.items() if not n.startswith("values ")
        }
        names = [*(c.name for c in self._columns), *self._counted.texts]
        for found in self._blocks(names, self._count):
            for name, values in found.items():
                total[name].values[:] += values
        return total

    def texts(self, name: str, part: int) -> tuple[pa.Array, np.ndarray]:
        """Returns the distinct texts of a column, and how often each is.  Sensitive.

        Args:
          name: Name of the column.
          part: Number of a part of its values.
        """

        def count(table: pa.Table) -> pa.Table:
            return count_texts(table[name], part, self.num_parts)

        return merged(self._blocks([name], count))

    def _blocks(
        self, names: Sequence[str], count: Callable[[pa.Table], Any]
    ) -> Iterator[Any]:
        """Yields the result of a function of each block of rows, in order."""

        def read(block: Block) -> Any:
            return count(read_table(block, names, self._dataset.is_listed))

        threads, blocks = num_cores(), self._dataset.blocks
        with ThreadPoolExecutor(threads) as pool:
            results = in_order(pool, read, blocks, 2 * threads)
            for block, found in zip(blocks, results, strict=True):
                yield found
                self._done += len(names) * block.num_rows
                self._reporter.advance(self._done)

    def _count(self, table: pa.Table) -> dict[str, np.ndarray]:
        """Returns the sums of some rows, by name.  Sensitive."""
        counted, arrays = self._counted, table_columns(table, self._columns)
        missing = [
            pc.sum(pc.equal(table[name], "")).as_py() or 0
            if name in counted.texts
            else int(np.count_nonzero(_is_missing(arrays[name])))
            for name in counted.missing
        ]
        found = {MISSING: np.array(missing)} if missing else {}
        if counted.num_classes:
            last = counted.num_classes - 1
            labels = np.clip(arrays[LABEL].astype(np.int64), 0, last)
            found[LABEL] = np.bincount(labels, minlength=last + 1)
        if counted.most:
            found[ROWS] = np.array([len(table)])
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


def _is_missing(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.float32:
        return np.isnan(values)
    # An indicator is 1 where its number is missing, and an id is 0.
    return values != 0 if values.dtype == np.int8 else values == 0
