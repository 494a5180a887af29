"""Records of users."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.validation import InputError
from pipelines.core.users.bounded import ROW_WEIGHTS, USERS
from pipelines.files.key_files import create_key_file
from pipelines.files.unfinished import unfinished_folder
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.engine_tasks import run_on_engine
from pipelines.job.runtime.tasks import Runtime
from pipelines.users import bound_folder, user_records
from pipelines.users.bound import bound
from pipelines.users.bound_job import BoundSettings

ROWS, MOST = 900, 3
USER = np.random.default_rng(5).zipf(1.4, ROWS) % 120


def settings(**changes: Any) -> BoundSettings:
    fields = {"max_examples_per_user": MOST, "num_examples": 120, **changes}
    return BoundSettings(user_column="user", sampled=USERS, **fields)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two files; ``row`` says which they are, ``pair`` is a list."""
    folder = tmp_path_factory.mktemp("table")
    for number, rows in enumerate(np.array_split(np.arange(ROWS), 2)):
        pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(rows + 1.0, 2)), 2)
        found = {"row": rows, "user": [f"u{u}" for u in USER[rows]], "pair": pairs}
        path = folder / f"part-{number}.parquet"
        pq.write_table(pa.table(found), path, row_group_size=80)
    return folder


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs, several parts, and a row group of a few users."""
    monkeypatch.setattr(bound_folder, "RUN_ROWS", 200)
    monkeypatch.setattr(bound_folder, "TASK_BYTES", 1 << 13)
    monkeypatch.setattr(user_records, "_MOST_ROWS", 7)


def records(out: pathlib.Path) -> dict[str, np.ndarray]:
    found = pq.read_table(out)
    return {name: np.array(found[name].to_pylist()) for name in found.column_names}


@pytest.mark.usefixtures("small_parts")
def test_one_record_of_each_user(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    bound(str(table), tmp_path / "out", settings(), runtime=Runtime(num_threads=1))
    assert len(list((tmp_path / "out").iterdir())) > 3
    found = records(tmp_path / "out")
    users = []
    for rows, weights in zip(found["row"], found[ROW_WEIGHTS], strict=True):
        mine = rows[weights == 1]
        (user,) = set(USER[mine])
        assert len(mine) == min(MOST, (user == USER).sum())
        assert (np.diff(mine) > 0).all()
        users.append(user)
    assert sorted(users) == sorted(set(USER))


def test_the_rest_is_zero(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    bound(str(table), tmp_path / "out", settings())
    found = records(tmp_path / "out")
    padding = found[ROW_WEIGHTS] == 0
    assert 0 < padding.sum() < padding.size
    assert set(np.unique(found[ROW_WEIGHTS])) == {0.0, 1.0}
    assert (found["row"][padding] == 0).all()
    assert (found["pair"][padding] == 0).all()
    real = ~padding
    assert (found["pair"][real] == found["row"][real][:, None] + 1).all()


@pytest.mark.usefixtures("small_parts")
def test_pure_function(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    key_file = tmp_path / "key"
    create_key_file(key_file)

    def make(name: str, **options: Any) -> dict[str, bytes]:
        out = tmp_path / name
        bound(str(table), out, settings(), key_file=key_file, **options)
        return {path.name: path.read_bytes() for path in out.iterdir()}

    found = make("here", runtime=Runtime(num_threads=1))
    assert (
        make("limited", runtime=Runtime(num_threads=2), memory_limit=1 << 30) == found
    )
    engine = functools.partial(run_on_engine, PipelineOptions(["--runner=FnApiRunner"]))
    assert make("engine", runtime=Runtime(num_threads=1, run_tasks=engine)) == found


def test_columns_are_those_of_batches(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bound(str(table), tmp_path / "out", settings(max_examples_per_user=1))
    found = {c.name: c.shape for c in list_blocks(str(tmp_path / "out")).columns}
    assert found == {"row": (1,), "pair": (1, 2), ROW_WEIGHTS: (1,)}


def test_a_record_fits_a_row_group(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_records, "ROW_GROUP_BYTES", 3 * (8 + 2 * 8 + 4))
    bound(str(table), tmp_path / "out", settings(max_examples_per_user=3))
    with pytest.raises(InputError, match=r"max_examples_per_user=4 <= 3\. .* fewer"):
        bound(str(table), tmp_path / "more", settings(max_examples_per_user=4))
    assert not (tmp_path / "more.unfinished").exists()


def test_wide_rows_make_small_tasks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that holds its rows four times stays below its share of memory."""
    rows, width, share = 600, 50, 1 << 16
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * width)), width)
    table = pa.table({"user": np.arange(rows), "wide": wide})
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=20)
    monkeypatch.setattr(bound_folder, "TASK_BYTES", share)
    source = str(tmp_path / "table.parquet")
    with unfinished_folder(tmp_path / "out") as folder:
        groups = bound_folder.check_input(source, settings())
        job = bound_folder.open_job(folder, groups, settings(), None)
    most = max(*(run.num_rows for run in job.runs), rows / job.num_parts)
    assert share / 2 < 4 * most * (8 + width * 8 + 4) < share


def test_more_users_than_slots_are_refused(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    few = len(set(USER)) - 1
    with pytest.raises(InputError, match=f"num_examples={few} to be at least the user"):
        bound(str(table), tmp_path / "out", settings(num_examples=few))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("column", "message"),
    [("text", "column text of type string"), (ROW_WEIGHTS, "Expected no column row_w")],
)
def test_other_columns_are_refused_before_any_work(
    tmp_path: pathlib.Path, column: str, message: str
) -> None:
    values: Any = ["a"] if column == "text" else [1.0]
    pq.write_table(pa.table({"user": [1], column: values}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match=message):
        bound(str(tmp_path / "in.parquet"), tmp_path / "out", settings())
    assert not (tmp_path / "out.unfinished").exists()
