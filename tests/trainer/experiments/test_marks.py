"""Experiments: a budget of their rows says for good that no epsilon covers them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

import dpsgd
from accounting.core.validation import InputError
from pipelines.inputs.parquet_blocks import list_row_groups
from pipelines.inputs.source_table import SourceTable, table_of
from tests.trainer.conftest import TABLE
from tests.trainer.experiments.conftest import Work
from trainer.experiments.compare import compare
from trainer.experiments.comparison import runs
from trainer.experiments.comparison.runs import mark
from trainer.run import budget
from trainer.run.reservation import Budget

#: Commands that read rows without an epsilon -> flags that they need.
COMMANDS = {"compare": "{rows} --epsilon=1"}
SAID = "No epsilon covers the runs of an experiment in {out}."


@pytest.fixture
def reserve(small_batches: Any, tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """``reserve(table, folder="budgets")``: the file of a budget for a table."""

    def make(table: SourceTable, folder: str = "budgets") -> pathlib.Path:
        path = tmp_path / folder / "table.budget"
        path.parent.mkdir(exist_ok=True)
        manifest = small_batches.manifest
        given = {"num_runs": 1, "epsilon": 3.0, "delta": 1e-4}
        budget.create(path, Budget.reserve(manifest, table, **given))
        return path

    return make


def _tables(settings: Any) -> list[SourceTable]:
    places = (settings.source, str(settings.held_out))
    return [table_of(list_row_groups(place)) for place in places]


@pytest.mark.parametrize("place", [0, 1], ids=["trained on", "held out"])
@pytest.mark.parametrize("is_closed", [False, True])
def test_rows_of_a_budget_mark_it_for_good_also_if_it_is_closed(
    make_settings: Any, reserve: Any, place: int, is_closed: bool
) -> None:
    settings = make_settings()
    path = reserve(_tables(settings)[place])
    if is_closed:
        budget.close(path)
    before = budget.read(path)
    for _ in range(2):  # it goes on
        mark(dataclasses.replace(settings, budget=path))
    found = budget.read(path)
    assert SAID.format(out=settings.out) in found.claim
    assert dataclasses.replace(found, uncovered=()) == before


def test_rows_of_another_table_leave_a_budget_as_it_was(
    make_settings: Any, reserve: Any
) -> None:
    path = reserve(TABLE)
    before = path.read_bytes()
    with pytest.raises(InputError, match="were read from other files"):
        mark(make_settings(budget=path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("is_here", [True, False])
def test_a_budget_that_is_not_given_is_found_here_or_beside_the_results(
    make_settings: Any,
    reserve: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    is_here: bool,
) -> None:
    settings = make_settings()
    path = reserve(_tables(settings)[1])
    (path.parent / "large.parquet").write_bytes(b"PAR1")
    if is_here:
        monkeypatch.chdir(path.parent)
    else:
        settings = dataclasses.replace(settings, out=path.parent / "out")
    with pytest.raises(
        InputError, match=r"--budget .*table\.budget, which is of these"
    ):
        mark(settings)
    assert budget.read(path).uncovered == ()
    monkeypatch.chdir(tmp_path)
    mark(make_settings(out=tmp_path / "elsewhere" / "out"))


def test_a_refused_experiment_marks_no_budget(
    make_settings: Any, reserve: Any, work: Work
) -> None:
    settings = make_settings()
    path = reserve(_tables(settings)[0])
    refused = dataclasses.replace(settings, budget=path, metric="nosuch")
    with pytest.raises(InputError, match="nosuch"):
        compare(refused)
    assert budget.read(path).uncovered == ()
    assert work.batches == []


class BeganError(Exception):
    """Batches or a run would be made."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_experiment_marks_the_budget_before_it_makes_anything(
    name: str,
    make_settings: Any,
    small_batches: Any,
    reserve: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, seen = make_settings(), list[tuple[str, ...]]()
    path = reserve(_tables(settings)[1])

    def begin(*_: Any, **__: Any) -> None:
        seen.append(budget.read(path).uncovered)
        raise BeganError

    monkeypatch.setattr(runs.separate_process, "call", begin)
    source = f"--input={settings.source}"
    flags = COMMANDS[name].format(
        source=source,
        rows=f"{source} --batch-size=8 --epochs=1 --delta=1e-3",
        batches=small_batches.path,
    )
    given = [*flags.split(), f"--eval={settings.held_out}", f"--out={settings.out}"]
    with pytest.raises(BeganError):
        CliRunner().invoke(
            dpsgd.cli, [name, *given, f"--budget={path}"], catch_exceptions=False
        )
    assert [len(each) for each in seen] == [1]
