"""Tables, read as `prepare` reads them; and its hash, one text at a time."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.tables import reading
from pipelines.tables.cells import FAULT, Select
from pipelines.tables.schema import Schema
from pipelines.tables.table_files import connect, list_table


@dataclasses.dataclass
class Read:
    """Well-formed rows, and why each of all rows is malformed, or None."""

    arrays: dict[str, np.ndarray]
    splits: np.ndarray | None
    users: list[str]
    reasons: list[str | None]


class _Watched(reading.Reader):
    """A reader that keeps what is wrong with each row."""

    def _rows(self, block: Any, select: Select, *more: Any) -> Any:
        numbers = block.column(FAULT).to_pylist()
        self.reasons = getattr(self, "reasons", [])
        self.reasons += [select.faults[n - 1] if n else None for n in numbers]
        return super()._rows(block, select, *more)


def read(schema: Schema, columns: Mapping[str, Any]) -> Read:
    """What a table becomes."""
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        pq.write_table(pa.table(dict(columns)), file.name)
        reader = _Watched(*list_table(file.name), schema)
        found = list(reader)
    assert reader.malformed.num_bad == sum(each is not None for each in reader.reasons)
    names = found[0].arrays if found else ()
    splits = [each.splits for each in found if each.splits is not None]
    users = [each.users for each in found if each.users is not None]
    return Read(
        arrays={n: np.concatenate([each.arrays[n] for each in found]) for n in names},
        splits=np.concatenate(splits) if splits else None,
        users=[user for each in users for user in each.to_pylist()],
        reasons=reader.reasons,
    )


def selected(array: pa.Array, select: Select, expression: str) -> list[Any]:
    """The values of an expression, "bad" where a row is malformed."""
    select.output("found", expression)
    with connect() as database:
        how = ["VARCHAR"], "VARCHAR"
        kind = reading.PythonUDFType.ARROW
        database.create_function("nfkc", reading._nfkc, *how, type=kind)
        database.register("memory_table", pa.table({"f0": array}))
        found = database.sql(select.sql("memory_table")).to_arrow_table().to_pylist()
    return ["bad" if row[FAULT] else row["found"] for row in found]


def type_of(array: pa.Array) -> str:
    """The type of an array in DuckDB."""
    with connect() as database:
        database.register("memory_table", pa.table({"f0": array}))
        return str(database.sql("SELECT f0 FROM memory_table").types[0])


MASK = (1 << 64) - 1


def mix(state: int) -> int:
    """The finaliser of splitmix64."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def hash_string(salt: int, data: bytes) -> int:
    """The hash of ``pipelines.core.hashing``, of one text."""
    state = salt ^ len(data) * 0x9E3779B97F4A7C15 & MASK
    for start in range(0, max(1, len(data)), 8):
        state = mix(state ^ int.from_bytes(data[start : start + 8], "little"))
    return state
