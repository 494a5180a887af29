"""What releases something without the budget of its rows says that it adds."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest
from click.testing import CliRunner

from accounting.core.validation import InputError
from dpsgd.command_line import cli
from pipelines.inputs.parquet_blocks import list_blocks, list_row_groups
from pipelines.inputs.source_table import SourceTable, table_of
from tests.trainer.conftest import TABLE
from trainer.cli import budget_note
from trainer.run import budget
from trainer.run.reservation import Budget

SAID = "note: table.budget is a budget of these rows, in which this has no place: its"
PLANTED = "the work begins"
#: Commands -> flags, and the function by which each begins its work.
COMMANDS = {
    "train": (
        "--batches={batches} --out=new --noise-multiplier=1 --l2-norm-clip=1",
        "trainer.train.run_checked",
    ),
    "evaluate": (
        "run --batches={batches} --input={rows}",
        "trainer.releases.evaluate.evaluate_checked",
    ),
    "statistics": (
        "--input={rows} --schema=schema.toml --out=ranges.toml --epsilon=1 "
        "--delta=1e-6",
        "trainer.releases.table_statistics.statistics_checked",
    ),
    "tune": (
        "--input={rows} --score={rows} --out=tuned --runs=2 --epsilon=1 --delta=1e-6 "
        "--batch-size=8 --epochs=1",
        "trainer.releases.tuning.check",
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def reserve(batches: Any, table: SourceTable, path: str = "table.budget") -> None:
    given: dict[str, Any] = {"num_runs": 1, "epsilon": 3.0, "delta": 1e-4}
    found = Budget.reserve(batches.manifest, table, **given)
    budget.create(pathlib.Path(path), found)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_it_before_it_begins(
    small_batches: Any,
    held_out: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    flags, begin = COMMANDS[name]

    def plant(*_: Any, **__: Any) -> None:
        raise InputError(PLANTED)

    monkeypatch.setattr(begin, plant)
    # The checks of these want a run, or the table of a schema.
    request = types.SimpleNamespace(dataset=list_blocks(str(held_out)))
    for module in ("evaluate", "table_statistics"):
        monkeypatch.setattr(f"trainer.releases.{module}.check", lambda **_: request)
    words = flags.format(batches=small_batches.path, rows=held_out).split()
    alone = CliRunner().invoke(cli, [name, *words])
    assert str(alone.exception) == PLANTED, alone.output
    of_rows = table_of(list_row_groups(str(held_out)))
    reserve(small_batches, TABLE if name == "train" else of_rows)
    beside = CliRunner().invoke(cli, [name, *words])
    assert str(beside.exception) == PLANTED
    assert SAID in beside.stderr
    assert SAID not in alone.output


def test_nothing_is_said_with_the_budget_or_of_another_table(
    small_batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    reserve(small_batches, TABLE)
    path, out = pathlib.Path("table.budget"), pathlib.Path("run")
    budget_note.say(path, out, lambda: TABLE)
    budget_note.say(None, out, lambda: SourceTable(sources=("0" * 64,)))
    assert capsys.readouterr().err == ""


def test_a_budget_beside_the_results_is_found(
    small_batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    reserve(small_batches, TABLE, "../table.budget")
    budget_note.say(None, pathlib.Path("../run"), lambda: TABLE)
    assert "is a budget of these rows" in capsys.readouterr().err
