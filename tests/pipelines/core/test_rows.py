"""Guarantees of pipelines.core.rows."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.core import rows
from pipelines.core.batches.manifest import Column
from pipelines.inputs import parquet_blocks

BITS = np.array([np.nan, -0.0, 1e-40, -np.inf], np.float32)
PAIRS = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8, dtype="f8")), 2)
TABLE = {
    "x": pa.array(BITS),
    "flag": pa.array([True, False, True, True]),
    "half": pa.array(np.arange(4, dtype=np.float16)),
    "pair": PAIRS,
    "nested": pa.FixedSizeListArray.from_arrays(PAIRS, 2).take(pa.array([0, 1, 1, 0])),
}


def write(folder: pathlib.Path, table: dict[str, Any], name: str = "a") -> str:
    path = folder / f"{name}.parquet"
    pq.write_table(pa.table(table), path, row_group_size=3)
    return str(path)


def listed(*paths: str) -> rows.DataSet:
    return rows.list_blocks([(pathlib.Path(path).name, path) for path in paths])


def columns_of(path: str) -> tuple[Column, ...]:
    return parquet_blocks.list_blocks(path).columns


def test_every_row_once_in_order_bit_for_bit(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, TABLE)
    data, columns = listed(path), columns_of(path)
    assert [block.num_rows for block in data.blocks] == [3, 1]
    assert [block.first_row for block in data.blocks] == [0, 3]
    read = [data.read(block, columns) for block in data.blocks]
    found = dict(zip([c.name for c in columns], zip(*read, strict=True), strict=True))
    bits = {name: np.concatenate(parts).tobytes() for name, parts in found.items()}
    assert bits["x"] == BITS.tobytes()
    assert bits["flag"] == bytes([1, 0, 1, 1])
    assert bits["half"] == np.arange(4, dtype="<f2").tobytes()
    assert bits["pair"] == np.arange(8, dtype="<f8").tobytes()
    twice = np.arange(8, dtype="<f8").reshape(2, 4)
    assert bits["nested"] == twice[[0, 1, 1, 0]].tobytes()


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.0, None, 2.0]),
        pa.array([[1.0, None]] * 3, pa.list_(pa.float64(), 2)),
        pa.array([[1.0, 2.0], None, [1.0, 3.0]], pa.list_(pa.float64(), 2)),
        pa.array([1, 2, 3], pa.int64()),
        pa.array(["1", "2", "3"]),
        pa.array([[1.0]] * 3, pa.list_(pa.float64(), 1)),
    ],
)
def test_other_cells_are_refused_without_their_values(
    tmp_path: pathlib.Path, column: pa.Array
) -> None:
    shape = (2,) if pa.types.is_fixed_size_list(column.type) else ()
    data = listed(write(tmp_path, {"secretly": column}))
    wanted = Column(name="secretly", dtype="float64", shape=shape)
    with pytest.raises(InputError, match="intact and without nulls") as error:
        data.read(data.blocks[0], [wanted])
    assert error.value.__cause__ is None


def test_a_damaged_page_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"x": np.arange(1000)})
    pq.write_table(table, path, write_page_checksum=True, compression="none")
    data = listed(str(path))
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 3] ^= 1
    path.write_bytes(contents)
    with pytest.raises(InputError, match="intact"):
        data.read(data.blocks[0], [Column(name="x", dtype="int64", shape=())])


def test_the_digest_is_of_names_numbers_and_footers(tmp_path: pathlib.Path) -> None:
    one, two = write(tmp_path, TABLE), write(tmp_path, TABLE, "b")
    both = listed(one, two)
    assert both.digest == parquet_blocks.list_blocks(str(tmp_path)).digest
    renamed = rows.list_blocks([("a.parquet", one), ("c.parquet", two)])
    write(tmp_path, {**TABLE, "x": pa.array(BITS[::-1])}, "b")  # other statistics
    assert len({both.digest, renamed.digest, listed(one, two).digest}) == 3


def test_a_file_twice_is_refused(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, TABLE)
    with pytest.raises(InputError, match="once"):
        listed(path, path)


@pytest.mark.parametrize("contents", [b"", b"PAR1", b"x" * 100])
def test_other_files_are_refused(tmp_path: pathlib.Path, contents: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(contents)
    with pytest.raises(InputError, match="a Parquet file"):
        listed(str(tmp_path / "a.parquet"))
