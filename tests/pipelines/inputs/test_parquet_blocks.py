"""Row groups as blocks, and the keyed digests by which workers know them."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from accounting.core.validation import InputError
from pipelines.batches.folder import read_batches
from pipelines.files.key_sources import insecure_key
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    Dataset,
    know_input,
    list_blocks,
    numeric_columns,
    read_block,
    table_columns,
)
from tests.pipelines.conftest import SmallJobs, write_table


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
    columns = numeric_columns(table.schema)
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
            with pytest.raises(InputError, match="and intact"):
                read_block(dataset.blocks[0], dataset.columns, dataset.is_listed)
        else:  # what a file without checksums cannot tell
            read = read_block(dataset.blocks[0], dataset.columns, dataset.is_listed)
            assert read["x"][777] == 776


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


KEY = insecure_key(0)
#: Chance that a correct sampler would fail for a fresh key.
ERROR_RATE = 1e-6


def test_a_file_is_accepted_only_with_the_footer_that_was_listed(
    dataset: Dataset,
) -> None:
    known = know_input(KEY, dataset)
    key = known.data_set_key(KEY)
    for block in dataset.blocks:
        footer = dataset.footers[block.name]
        assert known.is_listed(key, block, footer)
        assert not known.is_listed(key, block, footer[::-1])
        assert not known.is_listed(insecure_key(1), block, footer)


def test_what_travels_tells_nothing_about_the_input(dataset: Dataset) -> None:
    one, other = (know_input(insecure_key(seed), dataset) for seed in (0, 1))
    assert one.input_id != other.input_id
    tags = [found.tags[i : i + 16] for found in (one, other) for i in range(0, 96, 16)]
    assert len(set(tags)) == 2 * 6
    for hidden in (dataset.digest, *dataset.footers.values()):
        assert bytes.fromhex(hidden)[:16] not in tags
        assert one.input_id not in hidden


def test_derivation_golden_value() -> None:
    """Recipe: the key of seed 0 and a data set without blocks.

    If it changes, no batches that were made before can be made again: raise
    FORMAT_VERSION and say so in the changelog.
    """
    nothing = Dataset(columns=(), blocks=(), description={}, files={}, footers={})
    assert know_input(KEY, nothing).data_set_key(KEY).hex() == GOLDEN


GOLDEN = "44b1e3a34bb848793b2bbcea6282a0dc2f47217a5dceb4952d1aaca881509e99"


@pytest.mark.parametrize("sampler", ["truncated-poisson", "dynamic-shuffle"])
def test_one_key_chooses_independently_for_two_data_sets_of_the_same_names(
    tmp_path: pathlib.Path, jobs: SmallJobs, sampler: str
) -> None:
    cap = {"truncated_batch_size": 30} if sampler == "truncated-poisson" else {}
    layout = jobs.layout(None, sampler=sampler, **cap)
    chosen = []
    for name, first in (("one", 0), ("other", 1000)):
        (tmp_path / name).mkdir()
        write_table(tmp_path / name / "part-0.parquet", first, 100, 25)
        dataset = list_blocks(str(tmp_path / name))
        out = jobs.write(f"{name}-batches", layout, dataset=dataset)
        steps = np.zeros((100, 40), int)
        for batch in read_batches(out):
            steps[batch.columns["id"][batch.weight == 1] - first, batch.step] = 1
        chosen.append(steps)
    # Of the steps of one epoch, because a persistent shuffle repeats it.  Given the
    # choices of one data set, the other makes each again with probability 1 / 10; in a
    # shuffle rows repel each other, which makes the law narrower than the binomial.
    one, other = (steps[:, :10] for steps in chosen)
    again = stats.binomtest(int((one & other).sum()), int(one.sum()), 0.1)
    assert again.pvalue > ERROR_RATE
    same = stats.binomtest(int((one & one).sum()), int(one.sum()), 0.1)
    assert same.pvalue < ERROR_RATE  # the fault that this test is for
