"""What statistics count of a table: in blocks of rows, on all cores.

    rows             rows, if their number is not public
    label            rows by class
    single, groups   rows by the value of a numeric column: see `value_counts`
    values           rows by the text of a column: see `vocabularies`

Formal guarantees:
  - what is counted depends on the schema and on the columns of the table alone.
  - one row moves a sum by its ``bound`` at most, in L2 norm: it is in one cell of each.
    A user of at most k rows moves it by k times that.
  - shares of all sums add up to 1 at most; the parts of a column's ``values`` count
    once, since a row is in one of them.
  - memory does not depend on the number of rows: blocks are counted one by one, and of
    a column's distinct values one part at a time.

Public: names, bounds, shares.  Sensitive: values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

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
      texts: The same of categories whose values are not known.
      num_classes: Number of classes of the label; 0 if the schema does not say.
      most: Largest number of rows of one user; None if the unit is a row.
    """

    ranges: dict[str, str]
    texts: dict[str, str]
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
        firsts = {name: schema.outputs_of(name)[0] for name in schema.inputs}
        return cls(
            ranges={f.name: name for name, f in firsts.items() if f.role == COUNT},
            texts={name: schema.unlisted[name] for name in texts},
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
                values=np.zeros(size, np.int64),
                bound=most,
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
        wanted = {LABEL, *counted.ranges, *map(_indicator, counted.ranges)}
        self._columns = tuple(c for c in dataset.columns if c.name in wanted)

    def start(self) -> None:
        """Reports the number of cells."""
        count = len(self._columns) + len(self._counted.texts) * self.num_parts
        self._reporter.start(count * self._dataset.num_rows, done=0)

    def stop(self) -> None:
        """Reports the end."""
        self._reporter.stop()

    def known(self) -> dict[str, RowSum]:
        """Returns all sums but those of texts.  Sensitive."""
        total = {
            n: s for n, s in self._counted.sums.items() if not n.startswith("values ")
        }
        for found in self._blocks([c.name for c in self._columns], self._count):
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
        found = {}
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
