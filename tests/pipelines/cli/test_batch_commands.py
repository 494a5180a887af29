"""``dpsgd batches`` and ``dpsgd verify`` on the command line."""

from __future__ import annotations

import json
import math
import pathlib
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.batches.verify import verify
from pipelines.files import progress_bars
from tests.command_line import Result, invoke
from tests.pipelines.conftest import Command, write_table
from tests.pipelines.waiting_job import waiting_job


@pytest.fixture
def started(
    root: pathlib.Path, tmp_path: pathlib.Path, warm_starts: None
) -> Iterator[tuple[list[str], pathlib.Path, subprocess.Popen[str]]]:
    """A job of twenty blocks, once it has written its first spill file."""
    write_table(tmp_path / "rows.parquet", 0, 2000, 100)
    arguments = [
        "batches", f"--input={tmp_path / 'rows.parquet'}", f"--out={tmp_path / 'o'}",
        "--batch-size=100", "--epochs=2",
    ]  # fmt: skip
    with waiting_job(arguments, root) as process:
        yield arguments, tmp_path / "o", process


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_a_signal_is_one_line_and_the_same_command_goes_on(
    started: tuple[list[str], pathlib.Path, subprocess.Popen[str]],
    command: Command,
    number: int,
) -> None:
    arguments, out, process = started
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert "error: Stopped by a signal. Give the same command again" in errors
    again = command(*arguments)
    assert again.code == 0, again.printed
    assert verify(out).findings == ()
    assert out.stat().st_mode & 0o077 == 0


def batches(*arguments: object) -> Result:
    return invoke(["batches", *arguments])


@pytest.fixture
def rows(tmp_path: pathlib.Path) -> list[str]:
    """Options of a job of 1000 rows in two blocks."""
    write_table(tmp_path / "rows.parquet", 0, 1000, 500)
    files = [f"--input={tmp_path / 'rows.parquet'}", f"--out={tmp_path / 'out'}"]
    return [*files, "--batch-size=100", "--json"]


def test_dry_run_says_what_it_would_cost_and_writes_nothing(
    input_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    said = json.loads(
        batches(
            "--input", input_folder, "--out", tmp_path / "o", "--batch-size=10",
            "--epochs=4", "--truncated-batch-size=14", "--physical-batch-size=7",
            "--dry-run", "--json",
        ).stdout
    )  # fmt: skip
    assert said["num_steps"] == 40
    # 17 bytes a row; 12 more on the way, 4 more of weight; two records of 7 rows.
    assert said["shuffle_bytes"] == 40 * 10 * (17 + 12)
    assert said["output_bytes"] == 40 * 14 * (17 + 4)
    assert 512 << 20 < said["bytes_per_worker"] < 513 << 20
    assert said["expected_padding"] == pytest.approx(0.4)
    assert not (tmp_path / "o").exists()


def test_a_column_that_seems_to_name_users_is_noted_until_it_is_bounded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pa.table({"user_id": np.arange(20) % 7, "client": np.arange(20)})
    pq.write_table(table, "my rows.parquet")
    dry = ("--batch-size=2", "--epochs=1", "--out=o", "--dry-run")
    printed = command("batches", "--input=my rows.parquet", *dry).printed
    assert "note: column user_id seems to name users" in printed
    # Its remedy works when it is typed.
    [remedy] = re.findall("with `(.*)`", printed)
    pathlib.Path("schema.toml").write_text(
        'version = 1\n[columns.client]\nkind = "label"\n'
        'task = "classes"\nclasses = 20\n'
    )
    again = ("--input=my rows.parquet", "--schema=schema.toml", "--out=bounded")
    assert command("prepare", *again, *shlex.split(remedy)).code == 0
    ran = command("batches", "--input=bounded/train", *dry)
    assert ran.code == 0
    assert "seems to name users" not in ran.printed


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bars.Bars({"steps": 3}) as bars:
        # A test may pause for longer than there is between two lines.
        for seconds in (math.inf, 0.0, math.inf):
            monkeypatch.setattr(progress_bars, "_LINE_SECONDS", seconds)
            bars.advance("steps", 1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["steps: 2 of 3", "steps: 3 of 3"]


@pytest.mark.parametrize(
    ("given", "sampler", "bands"),
    [
        ([], "truncated-poisson", None),
        (["--bands=1"], "truncated-poisson", None),
        (["--bands=4"], "truncated-cyclic-poisson", 4),
        (["--bands=auto", "--epsilon=1"], "truncated-cyclic-poisson", 8),
        (["--epsilon=1", "--sampler=poisson"], "cyclic-poisson", 8),
        (["--epsilon=1", "--sampler=balls-and-bins"], "balls-and-bins", None),
        (["--epsilon=1", "--bands=1"], "truncated-poisson", None),
    ],
)
def test_bands_make_groups_of_the_rows_by_the_rule_or_as_given(
    given: list[str], sampler: str, bands: int | None, tmp_path: pathlib.Path
) -> None:
    write_table(tmp_path / "rows.parquet", 0, 20_000, 20_000)
    arguments = [
        f"--input={tmp_path / 'rows.parquet'}", f"--out={tmp_path / 'o'}", "--dry-run",
        "--batch-size=100", "--epochs=1", "--json",
    ]  # fmt: skip
    done = invoke(["batches", *arguments, *given], catch=False)
    summary = json.loads(done.stdout)
    assert (summary["sampler"], summary.get("bands")) == (sampler, bands)
    assert ("by the rule: iterates have 0." in done.stderr) == (bands == 8)
