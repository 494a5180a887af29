"""Rows of one's own pipeline, through ``PrepareRows`` and on to batches."""

from __future__ import annotations

import datetime
import pathlib
import stat
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.plan import DpSgdPlan
from accounting.validation import InputError
from pipelines.batches.reader import read_batches
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.poisson_batches import PoissonBatches
from pipelines.tables.convert import prepare
from pipelines.tables.prepare_rows import PrepareRows, _Convert
from pipelines.tables.schema.schema import Schema
from pipelines.tables.table_format import TableOptions

CANARY = "5ec4e7ca"
SCHEMA = Schema.from_json(
    {
        "version": 1,
        "split": {"by": "hash", "column": "who"},
        "columns": {
            "who": {"kind": "drop"},
            "id": {"kind": "numeric"},
            "job": {"kind": "category", "buckets": 99},
            "day": {"kind": "date"},
            "tags": {"kind": "category", "length": 2},
            "y": {"kind": "label", "task": "binary"},
        },
    }
)
ROWS: list[dict[str, Any]] = [
    {
        "who": f"person {number // 2}",
        "id": number,
        "job": [None, "clerk", "farmer"][number % 3],
        "day": datetime.date(2020, 1, 1 + number % 30),
        "tags": ["a", "b", "c"][: number % 4],
        "y": bool(number % 2),
    }
    for number in range(300)
]


def run(rows: list[dict[str, Any]], out: pathlib.Path, **options: Any) -> None:
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(rows) | PrepareRows(SCHEMA, out, **options)


def sorted_rows(folder: pathlib.Path) -> str:
    return repr(pq.read_table(folder).sort_by("id").to_pydict())


def test_rows_become_what_prepare_makes_of_them_and_then_batches(
    tmp_path: pathlib.Path,
) -> None:
    bad = {**ROWS[0], "day": None, "y": None}
    run([*ROWS, bad], tmp_path / "out", on_bad_row="skip")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    prepare(
        str(tmp_path / "t.parquet"), tmp_path / "wanted", TableOptions(schema=SCHEMA)
    )
    for split in ("train", "val", "test"):
        found = sorted_rows(tmp_path / "out" / split)
        assert found == sorted_rows(tmp_path / "wanted" / split)
    run(ROWS[:9], tmp_path / "two", files_per_split=2)
    assert len(list((tmp_path / "two" / "train").iterdir())) == 2
    dataset = list_blocks(str(tmp_path / "out" / "train"))
    assert dataset.description == SCHEMA.description
    plan = DpSgdPlan(
        sampler="poisson", num_examples=dataset.num_examples, expected_batch_size=20,
        num_steps=6,
    )  # fmt: skip
    batches = PoissonBatches(plan, dataset, tmp_path / "batches")
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(dataset.blocks) | batches
    assert batches.finish().dataset == SCHEMA.description
    train = set(pq.read_table(tmp_path / "wanted" / "train")["id"].to_pylist())
    seen = [
        batch.columns["id"][batch.weight > 0]
        for batch in read_batches(tmp_path / "batches")
    ]
    assert set(np.concatenate(seen)) <= train


def test_a_malformed_row_fails_the_pipeline_without_its_content(
    tmp_path: pathlib.Path,
) -> None:
    for wrong, message in (
        ({"y": CANARY}, "y is no integer from 0 to 1"),
        ({"job": {"a": CANARY}}, 'kind = "drop"'),
        ({"id": [CANARY, 1]}, "values of one type in column id"),
    ):
        with pytest.raises(InputError) as refused:
            list(_Convert(SCHEMA, "fail").process([{**ROWS[0], **wrong}]))
        assert message in str(refused.value)
        assert CANARY not in str(refused.value)
    with pytest.raises(Exception, match="y is no integer from 0 to 1") as failed:
        run([{**ROWS[0], "y": CANARY}], tmp_path / "out")
    assert CANARY not in str(failed.value)


def test_what_a_pipeline_cannot_do_is_refused_before_it_runs(
    tmp_path: pathlib.Path,
) -> None:
    fields = {**SCHEMA.to_json(), "split": {}}
    with pytest.raises(InputError, match='by = "hash"'):
        PrepareRows(Schema.from_json(fields), tmp_path / "out")
    with pytest.raises(InputError, match="on_bad_row"):
        PrepareRows(SCHEMA, tmp_path / "out", on_bad_row="x")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(InputError, match="new or an empty folder"):
        run(ROWS, tmp_path / "used")
