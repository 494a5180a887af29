"""A budget: several runs under one epsilon, reserved before the first of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from accounting.core import accountant
from accounting.core.pld.gaussian import gaussian_noise
from accounting.core.validation import InputError
from pipelines.batches.stored import stored
from tests.at_once import at_once
from tests.trainer.conftest import TABLE
from tests.trainer.run.whole_runs import LINEAR, private_settings
from trainer.cli.commands import account
from trainer.cli.releases.budget_commands import budget_command
from trainer.core.step.dp_step import Step
from trainer.run import budget, reservation
from trainer.run.reservation import Budget
from trainer.train import train

DELTA = 1e-4

pytestmark = pytest.mark.usefixtures("lean_results")


_RESERVED: dict[tuple[str, int], Budget] = {}


def reserved(batches: Any, num_runs: int) -> Budget:
    """A budget of epsilon 3 for runs on such batches; its noise is searched once."""
    asked = (batches.manifest.fingerprint, num_runs)
    if asked not in _RESERVED:
        _RESERVED[asked] = Budget.reserve(
            batches.manifest, TABLE, num_runs=num_runs, epsilon=3.0, delta=DELTA
        )
    return _RESERVED[asked]


@pytest.fixture
def file(small_batches: Any, tmp_path: pathlib.Path) -> pathlib.Path:
    """A budget for two runs."""
    path = tmp_path / "table.budget"
    found = reserved(small_batches, 2)
    budget.create(path, found)
    return path


@pytest.fixture
def request_of(
    request_for: Any, file: pathlib.Path, batch_folder: Any, rows: Any
) -> Callable[..., Any]:
    """``request_of(name, **changes)``: a run with batches of its own and the budget."""
    noise = budget.read(file).noise_multiplier

    def make(name: str, **changes: Any) -> Any:
        steps = [rows(6, seed) for seed in range(10)]
        ids = {"batches_id": name[-1] * 32, "seal_key": name[-1] * 64}
        batches = batch_folder(steps, f"batches-{name}", **ids)
        settings = {"noise_multiplier": noise, "target_delta": DELTA}
        settings |= changes.pop("settings", {})
        more = {"target_epsilon": None, **settings}
        return request_for(
            name,
            **{
                "batches": batches.path,
                "held_out": None,
                "budget": file,
                "settings": dataclasses.replace(
                    private_settings(optimizer="sgd", model=LINEAR), **more
                ),
                **changes,
            },
        )

    return make


def _charged(file: pathlib.Path) -> list[str]:
    return [pathlib.Path(each.folder).name for each in budget.read(file).charges]


def test_epsilon_is_that_of_all_runs_together(small_batches: Any) -> None:
    found = reserved(small_batches, 5)
    plan = small_batches.manifest.plan
    longer = dataclasses.replace(plan, num_steps=5 * plan.num_steps, num_epochs=5)
    together = accountant.epsilon(
        longer, noise_multiplier=found.noise_multiplier, delta=DELTA
    )
    assert found.statement.epsilon.guarantee == together.guarantee
    assert 2.99 < together.guarantee <= 3.0
    assert found.alone.epsilon.guarantee < together.guarantee
    assert "All 5 runs, their metrics and statistics together" in found.claim


def _charge(file: pathlib.Path, *runs: str) -> None:
    """Charges runs whose batches ``request_of`` makes."""
    for name in runs:
        budget.charge(
            file,
            run_id=name,
            batches_id=name[-1] * 32,
            folder=file.with_name(name),
            begins=True,
        )


def test_a_run_is_charged_before_its_first_noise_and_once_if_it_is_resumed(
    request_of: Any,
    crash: Any,
    file: pathlib.Path,
    held_out: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what no epsilon covers marks the budget for good."""
    seen = []
    noise = Step.noise

    def look(self: Step, *given: Any) -> Any:
        seen.append(_charged(file))
        return noise(self, *given)

    monkeypatch.setattr(Step, "noise", look)
    first = request_of("run-1", checkpoint_every=2)
    crash(first, 5)
    assert seen == [["run-1"]]
    train(first)
    assert seen == [["run-1"]] * 2
    assert "No epsilon covers" not in budget.read(file).claim
    train(request_of("run-2", held_out=held_out))
    assert seen[2:] == [["run-1", "run-2"]]
    assert _charged(file) == ["run-1", "run-2"]
    claim = budget.read(file).claim
    assert claim.count("No epsilon covers") == 1
    assert claim.endswith("run-2, by --eval.")
    assert budget.read(file).said()["uncovered"][0].startswith("the metrics of ")
    weights = {"initial_weights": "w.npz", "initial_weights_are_public": True}
    settings = dataclasses.replace(first.settings, **weights)
    (said,) = reservation.uncovered(dataclasses.replace(first, settings=settings))
    assert said.startswith("the initial weights of ")
    assert reservation.of_weights("search", [first.settings, settings])


def test_a_run_that_is_more_than_were_reserved_is_refused(
    request_of: Any, file: pathlib.Path
) -> None:
    _charge(file, "run-1", "run-2")
    third = request_of("run-3")
    with pytest.raises(InputError, match="free place among the 2"):
        train(third)
    assert not third.run.exists()


def test_a_link_is_the_file_that_it_leads_to(
    file: pathlib.Path, small_batches: Any, tmp_path: pathlib.Path
) -> None:
    """A link that was replaced would be a second budget, with places of its own."""
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "a.budget"
    link.symlink_to(file)
    _charge(file, "run-1")
    _charge(link, "run-2")
    assert link.is_symlink()
    assert _charged(file) == _charged(link) == ["run-1", "run-2"]
    with pytest.raises(InputError, match="free place"):
        _charge(link, "run-3")
    dangling = tmp_path / "links" / "b.budget"
    dangling.symlink_to(file.with_name("b.budget"))
    with pytest.raises(InputError, match="no other budget for this table"):
        budget.create(dangling, reserved(small_batches, 2))


def test_no_two_runs_share_batches(request_of: Any, file: pathlib.Path) -> None:
    _charge(file, "run-1")
    again = request_of("run-1")
    with pytest.raises(InputError, match="batches of its own"):
        train(dataclasses.replace(again, run=again.run.with_name("run-2")))
    assert _charged(file) == ["run-1"]


def test_no_two_runs_share_a_key(request_of: Any, file: pathlib.Path) -> None:
    """Batches of one key in another layout have the same rows in each step."""
    second = request_of("run-2")
    first = {"run_id": "run-1", "folder": file.with_name("run-1"), "begins": True}
    budget.charge(
        file, batches_id="1" * 32, key=stored(second.batches).key_name(), **first
    )
    with pytest.raises(InputError, match="batches of its own"):
        train(second)
    assert _charged(file) == ["run-1"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"noise_multiplier": 9.0}, "noise_multiplier"),
        ({"target_delta": 1e-5}, "delta"),
    ],
)
def test_a_run_of_another_noise_delta_or_mechanism_is_refused(
    request_of: Any, file: pathlib.Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        train(request_of("run-1", settings=settings))
    assert _charged(file) == []


def test_of_two_processes_one_gets_the_last_place(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "one.budget"
    found = reserved(small_batches, 1)
    budget.create(path, found)
    done = at_once(*(functools.partial(_charge, path, name) for name in "abcd"))
    assert done.count(False) == 3
    assert len(budget.read(path).charges) == 1


@pytest.mark.parametrize(
    "changes",
    [{"noise_multiplier": 0.5}, {"num_runs": 9}, {"version": 2}, {"plan": None}],
)
def test_an_edited_file_is_refused(file: pathlib.Path, changes: dict[str, Any]) -> None:
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, **changes}))
    with pytest.raises(InputError):
        budget.read(file)


def test_the_command_reserves_and_account_states(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "new.budget"
    given = [str(path), "--batches", str(small_batches.path), "--runs", "2"]
    given += ["--epsilon", "3", "--delta", "1e-4"]
    made = CliRunner().invoke(budget_command, given)
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(account, ["--budget", str(path)])
    assert shown.output == made.output
    lines = [line.split() for line in shown.output.splitlines()]
    assert ["runs", "train", "3.0000", "2", "0"] in lines
    assert ["evaluations", "held", "out", "3.0000", "2", "0"] in lines
    assert ["statistics", "any", "other", "3.0000", "1", "0"] in lines
    fields = json.loads(
        CliRunner().invoke(account, ["--budget", str(path), "--json"]).output
    )
    assert fields["num_runs"] == 2
    assert fields["statement"]["epsilon"] <= 3
    assert [each["kind"] for each in fields["slots"]] == [
        "runs", "evaluations", "statistics",
    ]  # fmt: skip
    closed = CliRunner().invoke(budget_command, [str(path), "--close"])
    assert "The budget is closed" in " ".join(closed.output.split())
    for wrong in (["--close", "--runs", "3"], given[1:3]):
        refused = CliRunner().invoke(budget_command, [str(path), *wrong])
        assert isinstance(refused.exception, InputError)
    assert "--runs, --epsilon, --delta" in str(refused.exception)
    again = CliRunner().invoke(budget_command, given)
    assert "never replaced" in str(again.exception)
    both = CliRunner().invoke(account, ["--budget", str(path), "--delta", "1e-3"])
    assert "Expected --budget alone" in str(both.exception)


def test_a_closed_budget_has_no_place_and_the_epsilon_of_all_slots(
    request_of: Any, crash: Any, file: pathlib.Path
) -> None:
    """A file that was rolled back is noticed where a run goes on."""
    empty = file.read_bytes()
    first = request_of("run-1", checkpoint_every=2)
    crash(first, 5)
    charged, before = file.read_bytes(), budget.read(file)
    file.write_bytes(empty)
    with pytest.raises(InputError, match="rolled back"):
        train(first)
    assert _charged(file) == []
    file.write_bytes(charged)
    closed = budget.close(file)
    assert closed == budget.read(file) == dataclasses.replace(before, is_closed=True)
    assert [each.epsilon for each in closed.slots] == [e.epsilon for e in before.slots]
    assert closed.claim.endswith("closed: nothing more has a place in it.")
    with pytest.raises(InputError, match="closed, which is final"):
        budget.close(file)
    second = request_of("run-2")
    with pytest.raises(InputError, match="closed, which is final"):
        train(second)
    assert not second.run.exists()
    train(first)  # it had a place
    assert budget.read(file) == closed


@pytest.mark.parametrize(
    "release",
    [
        lambda found: found.charged("b", "b", "run-b"),
        lambda found: found.searched("s", "val", "tuned"),
        lambda found: found.evaluated("a", "test"),
        lambda found: found.with_statistics("val", "ranges.toml"),
    ],
)
@pytest.mark.parametrize("has_run", [False, True])
def test_a_closed_budget_refuses_every_kind_of_release(
    small_batches: Any, release: Callable[[Budget], Budget], has_run: bool
) -> None:
    found = reserved(small_batches, 2)
    closed = (found.charged("a", "a", "run-a") if has_run else found).closed()
    with pytest.raises(InputError, match="closed, which is final"):
        release(closed)


def test_a_search_that_was_charged_before_the_end_names_its_winner(
    file: pathlib.Path,
) -> None:
    asked = {"search_id": "s", "part": "val", "folder": pathlib.Path("tuned")}
    budget.charge_search(file, **asked, begins=True)
    budget.close(file)
    budget.charge_search(file, **asked, begins=False)
    run = {"run_id": "w", "batches_id": "b", "folder": pathlib.Path("tuned/run")}
    budget.charge_winner(file, **run)
    with pytest.raises(InputError, match="closed, which is final"):
        budget.charge_evaluation(file, run_id="w", part="test")


def test_of_a_charge_and_a_close_at_once_none_is_lost(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    """One may find the file in use, and is refused."""
    path = tmp_path / "one.budget"
    found = reserved(small_batches, 1)
    budget.create(path, found)
    charged, closed = at_once(lambda: _charge(path, "a"), lambda: budget.close(path))
    after = budget.read(path)
    assert charged or closed
    assert (len(after.charges) == 1) == charged
    assert after.is_closed == closed


def test_no_part_gives_both_metrics_and_statistics_or_these_twice(
    small_batches: Any,
) -> None:
    found = reserved(small_batches, 2)
    for run in "ab":
        found = found.charged(run, run, run)
    counted = found.with_statistics("val", "ranges.toml")
    with pytest.raises(InputError, match=r"val gave ranges\.toml, and metrics"):
        counted.evaluated("a", "val")
    with pytest.raises(InputError, match="val did"):
        counted.with_statistics("val", "again.toml")
    evaluated = counted.evaluated("a", "test").evaluated("b", "test")
    with pytest.raises(InputError, match="test did"):
        evaluated.with_statistics("test", "again.toml")
    used = {each.kind: each.used for each in evaluated.slots}
    assert used == {
        "runs": ("a", "b"),
        "evaluations": ("a on test", "b on test"),
        "statistics": ("ranges.toml of val",),
    }


def test_a_search_has_the_place_of_all_runs_and_its_winner_is_evaluated_once(
    small_batches: Any,
) -> None:
    found = reserved(small_batches, 2)
    ran = found.charged("a", "a", "run-a")
    with pytest.raises(InputError, match="it did, in run-a"):
        ran.searched("s", "val", "tuned")
    searched = found.searched("s", "val", "tuned")
    assert searched.searched("s", "val", "tuned") == searched  # it goes on
    with pytest.raises(InputError, match="it did, in tuned"):
        searched.searched("t", "val", "again")
    with pytest.raises(InputError, match="tuned is one"):
        searched.charged("a", "a", "run-a")
    with pytest.raises(InputError, match="val did"):
        searched.with_statistics("val", "ranges.toml")
    counted = found.with_statistics("val", "ranges.toml")
    with pytest.raises(InputError, match=r"val gave those in ranges\.toml"):
        counted.searched("s", "val", "tuned")
    with pytest.raises(InputError, match="it was trained without it"):
        searched.evaluated("w", "test")  # the winner is not known yet
    won = searched.with_winner("w", "b", "tuned/run")
    assert won.with_winner("w", "b", "tuned/run") == won
    with pytest.raises(InputError, match="gave the scores of the search"):
        won.evaluated("w", "val")
    # One model is evaluated, where each of the runs would be.
    once = gaussian_noise(won.epsilon, won.delta)
    assert (won.num_models, won.noise_of_evaluations) == (1, once)
    assert found.noise_of_evaluations == pytest.approx(once * found.num_models**0.5)
    evaluated = won.evaluated("w", "test")
    with pytest.raises(InputError, match="evaluated before"):
        evaluated.evaluated("w", "test")
    used = {each.kind: (each.part, len(each.used)) for each in evaluated.slots}
    assert used == {
        "search": ("train", 1), "scores": ("val", 1), "evaluations": ("held out", 1),
        "statistics": ("any other", 0),
    }  # fmt: skip
    assert evaluated.claim.startswith("The search, its metrics and statistics together")
    assert "(3.0000, 0.0001)" in evaluated.claim
    assert "dpsgd account tuned/run" in evaluated.to_text()
    fields = json.loads(json.dumps(evaluated.to_json()))
    assert Budget.from_json(fields) == evaluated


def test_a_search_that_goes_on_notices_a_file_that_was_rolled_back(
    file: pathlib.Path,
) -> None:
    asked = {"search_id": "s", "part": "val", "folder": pathlib.Path("tuned")}
    before = file.read_bytes()
    budget.charge_search(file, **asked, begins=True)
    budget.charge_search(file, **asked, begins=False)
    file.write_bytes(before)
    with pytest.raises(InputError, match="rolled back"):
        budget.charge_search(file, **asked, begins=False)


@pytest.mark.parametrize(
    "changes",
    [{"part": "train"}, {"part": ""}, {"division": "9" * 32}, {"sources": ("9" * 64,)}],
)
def test_rows_that_train_or_are_of_another_table_have_no_slot(
    small_batches: Any, changes: dict[str, Any]
) -> None:
    found = reserved(small_batches, 1)
    others = dataclasses.replace(TABLE, part="val")
    found.check_other_part(others)
    with pytest.raises(InputError, match="that trains nothing"):
        found.check_other_part(dataclasses.replace(others, **changes))


@pytest.mark.parametrize(
    ("num_steps", "changes", "named"),
    [
        (9, {}, "plan"),
        (10, {"sources": ("1" * 64, "9" * 64)}, "rows of the table of the budget"),
        (10, {"sources": ()}, "rows of the table of the budget"),
        (10, {"division": "9" * 32}, "rows of the table of the budget"),
        (10, {"part": "test"}, "rows of the table of the budget"),
    ],
)
def test_a_run_of_another_plan_table_or_division_is_refused(
    request_of: Any,
    batch_folder: Any,
    rows: Any,
    file: pathlib.Path,
    num_steps: int,
    changes: dict[str, Any],
    named: str,
) -> None:
    table = dataclasses.replace(TABLE, **changes)
    steps = [rows(6, seed) for seed in range(num_steps)]
    others = batch_folder(steps, "others", batches_id="7" * 32, table=table)
    with pytest.raises(InputError, match=named):
        train(request_of("run-1", batches=others.path))
    assert _charged(file) == []


def test_a_second_budget_beside_the_first_is_refused(
    small_batches: Any, file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """One source file in common is enough; another table has a budget of its own."""

    def make(name: str, *sources: str) -> pathlib.Path:
        table = dataclasses.replace(TABLE, sources=sources)
        path = tmp_path / name
        found = dataclasses.replace(reserved(small_batches, 1), table=table)
        budget.create(path, found)
        return path

    with pytest.raises(InputError, match=r"other budget .*table\.budget"):
        make("second", "8" * 64, TABLE.sources[0])
    assert make("other", "8" * 64).stat().st_mode & 0o777 == 0o600
    assert file.stat().st_mode & 0o777 == 0o600


def test_batches_of_an_unknown_table_get_no_budget(small_batches: Any) -> None:
    unknown = dataclasses.replace(TABLE, sources=())
    with pytest.raises(InputError, match="know the files of their table"):
        Budget.reserve(
            small_batches.manifest, unknown, num_runs=1, epsilon=3.0, delta=DELTA
        )
