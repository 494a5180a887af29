"""At most k rows of each user: the folder, on this machine and on Beam."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
import re
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.validation import InputError
from pipelines.batches.folder import read_manifest
from pipelines.core.users.bounded import SAMPLED, Bounded
from pipelines.files.key_files import create_key_file
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY, list_blocks
from pipelines.inputs.source_table import KEPT_NAME
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.engine_tasks import run_on_engine
from pipelines.job.make_batches import open_input
from pipelines.job.poisson_batching import write_batches
from pipelines.job.runtime.tasks import Runtime
from pipelines.job.spill import write_spill
from pipelines.tables.job.prepare_job import prepare
from pipelines.tables.schema.schema import Schema, Split
from pipelines.tables.table_format import TableOptions
from pipelines.users import bound_folder, bound_job
from pipelines.users.bound import bound
from pipelines.users.bound_job import BoundJob, BoundSettings
from tests.pipelines.conftest import Command, contents
from tests.sampler_fields import needed

ROWS, MOST = 1200, 3
SETTINGS = BoundSettings(
    user_column="user", max_examples_per_user=MOST, num_examples=ROWS
)
USERS = np.random.default_rng(7).zipf(1.4, ROWS) % 150


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Three files in row groups of 110 rows; ``row`` says which they are."""
    folder = tmp_path_factory.mktemp("table")
    for number, rows in enumerate(np.array_split(np.arange(ROWS), 3)):
        names = [f"name of user {user}" for user in USERS[rows]]
        columns = {"row": rows, "user": names, "text": ["x"] * len(rows)}
        path = folder / f"part-{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=110)
    return folder


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("key") / "key"
    create_key_file(path)
    return path


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of three row groups, and several parts."""
    monkeypatch.setattr(bound_folder, "RUN_ROWS", 330)
    monkeypatch.setattr(bound_folder, "TASK_BYTES", 1 << 15)


def kept_rows(out: pathlib.Path) -> np.ndarray:
    return pq.read_table(out)["row"].to_numpy()


@pytest.mark.usefixtures("small_runs")
def test_at_most_k(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    bound(str(table), tmp_path / "out", SETTINGS)
    rows = kept_rows(tmp_path / "out")
    assert (np.diff(rows) > 0).all()  # in their order, none twice
    before, after = collections.Counter(USERS), collections.Counter(USERS[rows])
    assert after == {user: min(MOST, count) for user, count in before.items()}
    assert not (tmp_path / "out.unfinished").exists()
    # The id is gone.
    assert pq.read_table(tmp_path / "out").column_names == ["row", "text"]
    for data in contents(tmp_path / "out").values():
        assert b"name of user" not in data


def test_uniform_choice(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Rows of the largest user are kept alike, whatever file they are in.

    With a key of its own in each of 30 trials, the kept rows in the first third of its
    rows are hypergeometric; their sum is held within 6 deviations.
    """
    largest = np.bincount(USERS).argmax()
    mine = np.flatnonzero(largest == USERS)
    first, trials = len(mine) // 3, 30
    share = first / len(mine)
    found = 0
    for trial in range(trials):
        bound(
            str(table), tmp_path / str(trial), SETTINGS, runtime=Runtime(num_threads=1)
        )
        found += np.isin(kept_rows(tmp_path / str(trial)), mine[:first]).sum()
    spread = np.sqrt(trials * MOST * share * (1 - share))
    assert abs(found - trials * MOST * share) < 6 * spread


@pytest.mark.usefixtures("small_runs")
def test_pure_function(
    table: pathlib.Path, key_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def make(name: str, **options: Any) -> dict[str, bytes]:
        bound(str(table), tmp_path / name, SETTINGS, key_file=key_file, **options)
        return contents(tmp_path / name)

    found = make("one", runtime=Runtime(num_threads=1))
    assert len(found) == 5  # with `_source.json`
    assert make("two", runtime=Runtime(num_threads=2), memory_limit=1 << 30) == found
    engine = functools.partial(run_on_engine, PipelineOptions(["--runner=FnApiRunner"]))
    assert make("engine", runtime=Runtime(run_tasks=engine)) == found
    other = tmp_path / "other-key"
    create_key_file(other)
    bound(str(table), tmp_path / "other", SETTINGS, key_file=other)
    assert not np.array_equal(
        kept_rows(tmp_path / "other"), kept_rows(tmp_path / "one")
    )


def test_nothing_is_told(
    table: pathlib.Path,
    tmp_path: pathlib.Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("table").symlink_to(table)
    call = f"bound --user-column user --max-examples-per-user {MOST}"
    call += " --input table --out out --num-examples"
    told = command(*call.split(), 50).printed
    assert "num_examples=50 to be at least the rows that are kept" in told
    assert not pathlib.Path("out.unfinished").exists()
    told += command(*call.split(), ROWS).printed
    kept, users = len(kept_rows(tmp_path / "out")), len(np.unique(USERS))
    for number in (kept, ROWS - kept, users, np.bincount(USERS).max()):
        assert f"{number}" not in told


@pytest.mark.usefixtures("small_runs")
@pytest.mark.parametrize("task", ["list_ids", "choose", "write"])
def test_goes_on(
    table: pathlib.Path,
    key_file: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
) -> None:
    """A job whose second task of a step dies is finished by the same command."""
    made, calls = collections.Counter[str](), []
    one = {"key_file": key_file, "runtime": Runtime(num_threads=1)}
    run = functools.partial(bound, str(table), settings=SETTINGS, **one)

    def counted(name: str, function: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            made[name] += 1
            return function(path, *args, **options)

        return call

    monkeypatch.setattr(bound_job, "write_spill", counted("spill", write_spill))
    monkeypatch.setattr(pq, "ParquetWriter", counted("table", pq.ParquetWriter))
    run(out=tmp_path / "all")
    undisturbed = made.copy()
    assert min(undisturbed.values()) >= 4
    made.clear()
    original = getattr(BoundJob, task)

    def dies(job: BoundJob, item: Any) -> None:
        calls.append(item)
        if len(calls) == 2:
            raise MemoryError
        original(job, item)

    with monkeypatch.context() as patch:
        patch.setattr(BoundJob, task, dies)
        with pytest.raises(MemoryError):
            run(out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(out=tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "all")
    assert made == undisturbed  # what was done is not done again


@pytest.mark.parametrize("sampled", SAMPLED)
def test_half_a_file_does_not_come_into_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, sampled: str
) -> None:
    pq.write_table(pa.table({"user": [1, 2], "row": [3, 4]}), tmp_path / "in.parquet")
    settings = dataclasses.replace(SETTINGS, sampled=sampled)

    def dies(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", dies)
        with pytest.raises(MemoryError):
            bound(str(tmp_path / "in.parquet"), tmp_path / "out", settings)
    bound(str(tmp_path / "in.parquet"), tmp_path / "out", settings)
    assert set(contents(tmp_path / "out")) == {KEPT_NAME, "part-00000.parquet"}


def test_another_job_is_refused(
    table: pathlib.Path,
    tmp_path: pathlib.Path,
    key_file: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    out, other = tmp_path / "out", dataclasses.replace(SETTINGS, num_examples=ROWS + 1)
    with monkeypatch.context() as patch:
        patch.setattr(BoundJob, "choose", killed)
        with pytest.raises(KeyboardInterrupt):
            bound(str(table), out, SETTINGS, key_file=key_file)
    for settings, key in ((other, key_file), (SETTINGS, None)):
        with pytest.raises(InputError, match="its input, settings or key were others"):
            bound(str(table), out, settings, key_file=key)
    bound(str(table), out, SETTINGS, key_file=key_file)
    # By a new key, ids that are not read yet would be those of other users.
    out = tmp_path / "no-key"
    with monkeypatch.context() as patch:
        patch.setattr(BoundJob, "choose", killed)
        with pytest.raises(KeyboardInterrupt):
            bound(str(table), out, SETTINGS)
    (tmp_path / "no-key.unfinished" / "private.key").unlink()
    with pytest.raises(InputError, match="its key and ids were others"):
        bound(str(table), out, SETTINGS)


@pytest.mark.usefixtures("small_runs")
def test_tasks_that_an_engine_loses_are_an_error(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    calls = []

    def loses(task: Any, items: Any) -> None:
        calls.append(len(items))
        for item in items[len(calls) % 2 :]:
            task(item)

    run = functools.partial(bound, str(table), tmp_path / "out", SETTINGS)
    for step in ("read ids", "choose", "write"):
        with pytest.raises(InputError, match=f"step {step} to be done.* lost 1"):
            run(runtime=Runtime(run_tasks=loses))
    run(runtime=Runtime(run_tasks=loses))
    assert len(kept_rows(tmp_path / "out")) == sum(
        min(MOST, count) for count in collections.Counter(USERS).values()
    )


def test_changed_input_is_refused(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "table.parquet"
    copy.write_bytes((table / "part-0.parquet").read_bytes())

    def run_tasks(task: Any, items: Any) -> None:
        copy.write_bytes((table / "part-1.parquet").read_bytes())
        for item in items:
            task(item)

    with pytest.raises(InputError, match="not to change during the job"):
        bound(
            str(copy), tmp_path / "out", SETTINGS, runtime=Runtime(run_tasks=run_tasks)
        )


def test_wrong_tables_are_refused(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = BoundSettings(user_column="name", max_examples_per_user=1, num_examples=1)
    with pytest.raises(InputError, match="it has row, user, text"):
        bound(str(table), tmp_path / "out", other)
    bound(str(table), tmp_path / "out", SETTINGS)
    again = BoundSettings(user_column="text", max_examples_per_user=1, num_examples=1)
    with pytest.raises(InputError, match="not to be bounded already"):
        bound(str(tmp_path / "out"), tmp_path / "again", again)


@pytest.fixture(scope="module")
def bounded(
    table: pathlib.Path,
    key_file: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> pathlib.Path:
    """Numbers alone, bounded."""
    folder = tmp_path_factory.mktemp("bounded")
    numbers = pq.read_table(table, columns=["row", "user"])
    pq.write_table(numbers, folder / "numbers.parquet")
    bound(str(folder), folder / "out", SETTINGS, key_file=key_file)
    return folder / "out"


def test_batches_have_the_public_number_of_slots(
    bounded: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    settings = BatchSettings(expected_batch_size=40, num_epochs=1)
    dataset, layout = open_input(str(bounded), str(tmp_path / "out"), settings)
    assert dataset.num_rows < dataset.num_examples == ROWS
    manifest = write_batches(dataset=dataset, layout=layout, out=tmp_path / "out")
    assert manifest.plan.num_examples == ROWS
    told = Bounded.of(read_manifest(tmp_path / "out").dataset)
    assert told is not None
    assert told.max_examples_per_user == MOST


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("deterministic", "--sampler deterministic not to be used"),
        ("dynamic-shuffle", "--sampler dynamic-shuffle not to be used"),
        ("balls-and-bins", "balls-and-bins not to be used on up to 3 rows"),
        ("cyclic-poisson", "cyclic-poisson not to be used on up to 3 rows"),
    ],
)
def test_samplers_that_place_every_slot_or_have_no_proof_are_refused(
    bounded: pathlib.Path, tmp_path: pathlib.Path, sampler: str, message: str
) -> None:
    settings = BatchSettings(
        expected_batch_size=40, num_epochs=1, sampler=sampler, **needed(sampler)
    )
    dataset, layout = open_input(str(bounded), str(tmp_path / "out"), settings)
    with pytest.raises(InputError, match=message):  # no memory that blocks need
        write_batches(
            dataset=dataset, layout=layout, out=tmp_path / "out", memory_limit=1
        )


def test_batches_tell_nothing_of_users(
    tmp_path: pathlib.Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sizes of blocks nor their number depend on users alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipelines.files.progress_bars._LINE_SECONDS", 0.0)
    many, few = np.arange(ROWS), np.zeros(ROWS, int)
    few[-1] = 1  # one row group keeps nothing
    for name, users in (("many", many), ("few", few)):
        columns = {"user": users, "row": np.arange(len(users))}
        pq.write_table(pa.table(columns), f"{name}.parquet", row_group_size=600)
        bound(f"{name}.parquet", name, SETTINGS)

    def run(name: str, options: str) -> str:
        call = f"batches --batch-size 40 --epochs 1 --input {name} {options}"
        return command(*call.split()).printed.replace(name, "NAME")

    for options in ("--out x --dry-run", "--out x --memory-limit 1MiB"):
        assert run("many", options) == run("few", options)
    assert "blocks" not in run("many", "--out y")


def test_preparing_a_bounded_table_tells_nothing_of_users(
    tmp_path: pathlib.Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many rows were kept is in no summary, progress or error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipelines.files.progress_bars._LINE_SECONDS", 0.0)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "wrong.toml").write_text(
        SCHEMA.replace('row]\nkind = "numeric', 'row]\nkind = "boolean')
    )
    (tmp_path / "empty.toml").write_text(
        SCHEMA.replace('by = "hash"', 'by = "hash"\nshares = [1, 0, 10000000]')
    )
    (tmp_path / "lost.toml").write_text(
        f'{SCHEMA}\n[columns.z]\nkind = "numeric"\nrange = [0, 1]\n'
    )
    cells = ["1"] * (ROWS - 2) + ["no number"] * 2  # fewer than are kept
    for name, users in (("many", np.arange(ROWS)), ("few", np.zeros(ROWS, int))):
        row = np.arange(ROWS)
        columns = {"user": users, "row": row, "y": row % 2, "z": cells}
        pq.write_table(pa.table(columns), f"{name}.parquet")
        bound(f"{name}.parquet", name, SETTINGS)

    def run(name: str, schema: str, others: str = "") -> str:
        call = f"prepare --input {name} --schema {schema} --out {name}-{schema} --json"
        call += others
        found = command(*call.split()).printed.replace(name, "NAME")
        return re.sub(r'"seconds": [^,]*|, \d+ s left', "", found)

    for schema in ("schema.toml", "empty.toml"):
        assert run("many", schema) == run("few", schema)
    assert "1200" not in run("many", "wrong.toml")
    skipped = " --on-bad-row skip"
    assert run("many", "lost.toml", skipped) == run("few", "lost.toml", skipped)


def test_a_shared_key_is_refused(
    bounded: pathlib.Path, key_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    settings = BatchSettings(expected_batch_size=40, num_epochs=1)
    out = tmp_path / "out"
    dataset, layout = open_input(str(bounded), str(out), settings)
    with pytest.raises(InputError, match="it chose the rows of users"):
        write_batches(dataset=dataset, layout=layout, out=out, key_file=key_file)


def _refused(folder: pathlib.Path, message: str = "may have more rows than") -> None:
    options = TableOptions(schema=Schema.read(folder.parent / "schema.toml"))
    for read in (list_blocks, lambda path: prepare(path, folder.parent / "x", options)):
        with pytest.raises(InputError, match=message):
            read(str(folder))


def test_what_another_tool_made_of_a_bounded_table_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    """It keeps the note; of a user it may hold more rows."""
    rows = pa.table({"user": USERS, "row": np.arange(ROWS), "y": USERS % 2})
    pq.write_table(rows, tmp_path / "a.parquet")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    bounded = tmp_path / "out"
    bound(str(tmp_path / "a.parquet"), bounded, SETTINGS)
    part = bounded / "part-00000.parquet"
    found = pq.read_table(part)
    for made in (
        found,
        found.slice(1),
        found.append_column("z", found["y"]),
        pa.concat_tables([found, found.slice(0, 1)]),
    ):
        for place in ("alone", "copy"):  # the copy has a record of the files
            if place == "copy":
                shutil.copytree(bounded, tmp_path / place)
            (tmp_path / place).mkdir(exist_ok=True)
            pq.write_table(made, tmp_path / place / part.name)
            _refused(tmp_path / place)
            shutil.rmtree(tmp_path / place)
    shutil.copytree(bounded, tmp_path / "whole")
    assert list_blocks(str(tmp_path / "whole")).bounded is not None
    shutil.copy(part, bounded / "part-1.parquet")
    _refused(bounded)


def test_a_file_of_another_preparation_of_a_bounded_table_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    """Its rows may be those of a file that is there, in other row groups."""
    rows = pa.table({"user": USERS, "row": np.arange(ROWS), "y": USERS % 2})
    pq.write_table(rows, tmp_path / "a.parquet")
    most = dataclasses.replace(SETTINGS, num_examples=10 * ROWS)
    bound(str(tmp_path / "a.parquet"), tmp_path / "out", most)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    schema, links = Schema.read(tmp_path / "schema.toml"), tmp_path / "links"
    links.mkdir()
    for size in (100, 200):
        options = TableOptions(schema=schema, row_group_rows=size)
        prepare(str(tmp_path / "out"), tmp_path / f"by-{size}", options)
        part = tmp_path / f"by-{size}" / "train" / "part-00000.parquet"
        (links / f"{size}.parquet").symlink_to(part)
        assert list_blocks(str(links / f"{size}.parquet")).bounded is not None
    _refused(links, "to be one folder of rows of users")
    every = str(tmp_path / "by-*" / "train" / "*.parquet")
    for read in (list_blocks, lambda path: prepare(path, tmp_path / "x", options)):
        with pytest.raises(InputError, match="to be one folder of rows of users"):
            read(every)
    both = tmp_path / "by-100" / "train"
    shutil.copy(part, both / "part-00001.parquet")
    with pytest.raises(InputError, match="may have more rows than"):
        list_blocks(str(both))


def test_tables_bounded_one_by_one_are_refused_together(
    tmp_path: pathlib.Path, key_file: pathlib.Path
) -> None:
    """Of a user of both there may be twice as many rows as their notes say."""
    (tmp_path / "schema.toml").write_text(SCHEMA)
    options = TableOptions(schema=Schema.read(tmp_path / "schema.toml"))
    for first, month in enumerate(("may", "june")):
        rows = pa.table({"user": USERS, "row": np.arange(ROWS) + first, "y": USERS % 2})
        pq.write_table(rows, tmp_path / f"{month}.parquet")
        out = tmp_path / "both" / month
        few = dataclasses.replace(SETTINGS, num_examples=10 * ROWS)
        bound(str(tmp_path / f"{month}.parquet"), out, few, key_file=key_file)
        assert list_blocks(str(out)).bounded is not None
    with pytest.raises(InputError, match="of one table with the first file"):
        list_blocks(str(tmp_path / "both"))
    with pytest.raises(InputError, match="of one `dpsgd bound`"):
        prepare(str(tmp_path / "both"), tmp_path / "data", options)


SCHEMA = """\
version = 1
[split]
by = "hash"
column = "row"
[columns.row]
kind = "numeric"
[columns.y]
kind = "label"
task = "binary"
"""


def test_prepare_keeps_the_note_of_text(tmp_path: pathlib.Path) -> None:
    texts = {"row": map(str, range(ROWS)), "y": (f"{row % 2}" for row in range(ROWS))}
    columns = {name: list(values) for name, values in texts.items()}
    pq.write_table(pa.table({**columns, "user": USERS}), tmp_path / "a.parquet")
    bound(str(tmp_path / "a.parquet"), tmp_path / "out", SETTINGS)
    found = pq.read_table(tmp_path / "out")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    options = TableOptions(schema=Schema.read(tmp_path / "schema.toml"))
    for number in (8, 9):  # nothing is kept of two runs
        pq.write_table(found[:0], tmp_path / "out" / f"part-0000{number}.parquet")
    prepare(str(tmp_path / "out"), tmp_path / "data", options)
    train = list_blocks(str(tmp_path / "data" / "train"))
    assert train.bounded == Bounded.of(
        json.loads(found.schema.metadata[DATASET_METADATA_KEY])
    )
    assert train.num_rows < train.num_examples == ROWS
    by_fraction = dataclasses.replace(options.schema, split=Split())
    with pytest.raises(InputError, match="whose users are bounded: where a split"):
        prepare(str(tmp_path / "out"), tmp_path / "x", TableOptions(schema=by_fraction))


@pytest.mark.parametrize("pattern", ["", "a.csv", "*.csv"])
def test_csv_is_answered_with_the_commands_that_take_it(
    tmp_path: pathlib.Path, pattern: str
) -> None:
    (tmp_path / "a.csv").write_text("row,user\n1,ann\n")
    with pytest.raises(InputError, match=r"schema .* --user user .* itself") as error:
        bound(str(tmp_path / pattern), tmp_path / "out", SETTINGS)
    assert "ann" not in str(error.value)
