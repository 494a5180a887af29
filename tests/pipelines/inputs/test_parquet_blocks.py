"""Guarantees of pipelines.inputs.parquet_blocks."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    list_blocks,
    read_block,
    table_columns,
)
from tests.pipelines.conftest import write_table


def test_blocks_are_listed_in_order(input_folder: pathlib.Path) -> None:
    dataset = list_blocks(str(input_folder))
    assert [(b.label, b.num_rows, b.ordinal) for b in dataset.blocks] == [
        ("part-0.parquet#0", 25, 0),
        ("part-0.parquet#1", 25, 1),
        ("part-0.parquet#2", 10, 2),
        ("part-1.parquet#0", 25, 3),
        ("part-1.parquet#1", 15, 4),
    ]
    assert dataset.num_examples == 100
    by_glob = list_blocks(str(input_folder / "part-*.parquet"))
    assert by_glob == dataset
    assert list_blocks(str(input_folder / "part-0.parquet")).num_examples == 60


def test_rows_are_read_bit_for_bit(input_folder: pathlib.Path) -> None:
    dataset = list_blocks(str(input_folder))
    blocks = [read_block(b, dataset.columns, dataset.is_listed) for b in dataset.blocks]
    rows = {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}
    ids = np.arange(100)
    assert (rows["id"] == ids).all()
    assert (rows["pair"] == np.stack([ids, ids], 1) / 2).all()
    assert (rows["label"] == ids % 2).all()
    assert [str(values.dtype) for values in rows.values()] == [
        "int64",
        "float32",
        "int8",
    ]


def test_special_values_and_shapes_survive() -> None:
    table = pa.table(
        {
            "x": pa.array([np.nan, -0.0, np.inf], pa.float64()),
            "b": pa.array([True, False, True]),
            "image": pa.array(
                [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]]],
                pa.list_(pa.list_(pa.uint8(), 2), 2),
            ),
        }
    )
    from pipelines.inputs import parquet_blocks

    columns = tuple(parquet_blocks.column_of(field) for field in table.schema)
    for sliced in (table, pa.concat_tables([table.slice(0, 1), table.slice(1)])):
        rows = table_columns(sliced, columns)
        assert rows["x"].tobytes() == np.array([np.nan, -0.0, np.inf]).tobytes()
        assert rows["b"].tolist() == [1, 0, 1]
        assert rows["image"].reshape(-1).tolist() == list(range(1, 13))
    assert table_columns(table.slice(1, 1), columns)["image"].tolist() == [
        [[5, 6], [7, 8]]
    ]


@pytest.mark.parametrize("other", [{}, {"bounded": {"max_examples_per_user": 5}}])
def test_files_of_another_description_are_refused(
    tmp_path: pathlib.Path, other: dict[str, object]
) -> None:
    """The note of the first file would be taken for one about the rows of all."""
    for name, told in (("a", {"bounded": {"max_examples_per_user": 1}}), ("b", other)):
        metadata = {DATASET_METADATA_KEY: json.dumps(told)}
        rows = pa.table({"x": [1, 2]}).replace_schema_metadata(metadata)
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    with pytest.raises(InputError, match="of one table with the first file"):
        list_blocks(str(tmp_path))
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2.0])], names=["x", "x"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="columns with different names"):
        list_blocks(str(tmp_path / "twice.parquet"))


def test_a_changed_file_is_refused(tmp_path: pathlib.Path) -> None:
    write_table(tmp_path / "a.parquet", 0, 10, 5)
    dataset = list_blocks(str(tmp_path))
    write_table(tmp_path / "a.parquet", 1, 10, 5)
    with pytest.raises(InputError, match="not to change during the job"):
        read_block(dataset.blocks[0], dataset.columns, dataset.is_listed)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(InputError, match="to be readable"):
        read_block(dataset.blocks[0], dataset.columns, dataset.is_listed)


def test_a_page_that_changed_under_an_equal_footer_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    """A flipped bit of a value: the footer, and so the file's digest, stay the same."""
    table = pa.table({"x": pa.array(np.arange(1000), pa.int64())})
    path = tmp_path / "a.parquet"
    for checksum, found in ((True, True), (False, False)):
        pq.write_table(
            table, path, compression="none", use_dictionary=False,
            write_page_checksum=checksum,
        )  # fmt: skip
        dataset = list_blocks(str(tmp_path))
        data = bytearray(path.read_bytes())
        data[data.index(np.int64(777).tobytes())] ^= 1
        path.write_bytes(data)
        assert list_blocks(str(tmp_path)) == dataset
        if found:
            with pytest.raises(InputError, match="to be intact"):
                read_block(dataset.blocks[0], dataset.columns, dataset.is_listed)
        else:  # what a file without checksums cannot tell
            assert (
                read_block(dataset.blocks[0], dataset.columns, dataset.is_listed)["x"][
                    777
                ]
                == 776
            )


def test_unusable_columns_are_refused(tmp_path: pathlib.Path) -> None:
    for name, values in {
        "text": pa.array(["canary-value"]),
        "moment": pa.array([0], pa.timestamp("s")),
        "ragged": pa.array([[1]], pa.list_(pa.int32())),
        "bytes": pa.array([b"canary-value"]),
    }.items():
        pq.write_table(pa.table({name: values}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=f"column {name}.*dpsgd prepare") as error:
            list_blocks(str(tmp_path))
        assert "canary" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([77, None], pa.int32()),
        pa.array([[77, 77], None], pa.list_(pa.int32(), 2)),
        pa.array([[77, None]], pa.list_(pa.int32(), 2)),
    ],
)
def test_nulls_are_refused_without_naming_a_value(
    tmp_path: pathlib.Path, values: pa.Array
) -> None:
    table = pa.table({"x": values})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"column x of .* to hold no nulls") as error:
        list_blocks(str(tmp_path))
    assert "77" not in str(error.value)
    # Without statistics in the footer they are found when the block is read.
    pq.write_table(table, tmp_path / "a.parquet", write_statistics=False)
    dataset = list_blocks(str(tmp_path))
    with pytest.raises(InputError, match="to hold no nulls") as error:
        read_block(dataset.blocks[0], dataset.columns, dataset.is_listed)
    assert "77" not in str(error.value)


def test_missing_empty_or_foreign_input_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match="there are none"):
        list_blocks(str(tmp_path))
    write_table(tmp_path / "a.parquet", 0, 0, 5)
    with pytest.raises(InputError, match="Expected rows"):
        list_blocks(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"no Parquet file at all")
    with pytest.raises(InputError, match="to be a Parquet file"):
        list_blocks(str(tmp_path))


def test_files_with_other_columns_are_refused(tmp_path: pathlib.Path) -> None:
    write_table(tmp_path / "a.parquet", 0, 5, 5)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"columns of .*b\.parquet"):
        list_blocks(str(tmp_path))


def test_the_description_travels(tmp_path: pathlib.Path) -> None:
    described = {DATASET_METADATA_KEY: json.dumps({"name": "toy"}).encode()}
    table = pa.table({"x": [1]}).replace_schema_metadata(described)
    pq.write_table(table, tmp_path / "a.parquet")
    assert list_blocks(str(tmp_path)).description == {"name": "toy"}
    broken = table.replace_schema_metadata({DATASET_METADATA_KEY: b"[1]"})
    pq.write_table(broken, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="JSON object"):
        list_blocks(str(tmp_path))
