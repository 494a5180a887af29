"""Rows of a raw table as inputs of a model, for predictions.

Formal guarantees:
  - A row becomes the inputs that ``prepare`` makes of it; neither label nor split is
    needed.
  - All rows come in the order of the table: a malformed row is an error with file,
    number and reason, and nothing of its content.
  - Columns that are missing, or of a type that their kind does not accept, are refused
    before any row is read.

Public: schema and names of columns.  Sensitive: rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from accounting.core.validation import InputError, did_you_mean
from pipelines.core.threads import num_cores
from pipelines.files.storage import StrPath
from pipelines.tables.reading import Reader, check_columns
from pipelines.tables.schema import Schema
from pipelines.tables.table_files import list_table

#: Inputs of some rows, their carried columns, and the number of bytes read so far.
Part = tuple[dict[str, np.ndarray], pa.Table, int]


class RawInputs:
    """The rows of a table, without labels.

    Args:
      data: A file, a folder or a glob.
      schema: Schema of the training examples, from the manifest of their batches.
      carried: Columns that are passed on unchanged, such as an id.

    Attributes:
      num_bytes: Bytes of all files.
      carried_types: Name -> type of the carried columns.

    Raises:
      InputError: no table, or columns that do not fit the schema.
    """

    def __init__(
        self, data: StrPath, schema: Schema, carried: Sequence[str] = ()
    ) -> None:
        self._files = list_table(data)
        self._schema, self._carried = schema, tuple(carried)
        self.num_bytes = sum(file.size for file in self._files)
        first: dict[str, str] = {}
        for file in self._files:
            found = check_columns(file, schema, inputs_only=True)
            for name in self._carried:
                if name not in found:
                    raise InputError(
                        f"Expected column {name}, which is to be carried, in "
                        f"{file.shown}; it has {', '.join(found)}."
                        f"{did_you_mean(name, list(found))}"
                    )
                if first.setdefault(name, found[name]) != found[name]:
                    raise InputError(
                        f"Expected column {name}, which is to be carried, to be of one "
                        f"type in all files, not {first[name]} and {found[name]}. "
                        "Convert it, or do not carry it."
                    )
        reader = Reader(self._files[0], schema, inputs_only=True, carried=carried)
        self.carried_types: dict[str, pa.DataType] = reader.carried_types()

    def parts(self, num_rows: int) -> Iterator[Part]:
        """Yields all rows in order, at least ``num_rows`` at a time except at the end.

        Raises:
          InputError: a malformed row, or a damaged file.
        """
        waiting: list[Part] = []
        count, any_rows = 0, False
        for part in self._blocks():
            any_rows = True
            waiting.append(part)
            count += len(next(iter(part[0].values())))
            if count >= num_rows:
                yield _joined(waiting)
                waiting, count = [], 0
        if waiting:
            yield (*_joined(waiting)[:2], self.num_bytes)
        elif not any_rows:
            raise InputError(f"Expected rows in {self._files[0].shown}; it has none.")

    def _blocks(self) -> Iterator[Part]:
        before = 0
        for file in self._files:
            reader = Reader(
                file,
                self._schema,
                inputs_only=True,
                carried=self._carried,
                num_threads=num_cores(),
            )
            for rows in reader:
                if reader.malformed.num_bad:
                    continue  # what would be yielded is of no use
                done = min(file.size, int(rows.num_read * file.row_bytes))
                yield rows.arrays, rows.carried, before + done
            before += file.size
            reader.malformed.refuse(self._schema)


def _joined(parts: Sequence[Part]) -> Part:
    names = parts[0][0]
    inputs = {n: np.concatenate([each[n] for each, _, _ in parts]) for n in names}
    return inputs, pa.concat_tables([each for _, each, _ in parts]), parts[-1][2]
