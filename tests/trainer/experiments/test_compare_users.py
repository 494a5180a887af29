"""Rows and users compared at one epsilon: what is made once, and what is sampled."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from accounting.core import accountant
from accounting.core.validation import InputError
from pipelines.files.stopping import StoppedError
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.experiments.conftest import PRIVATE, Work
from tests.trainer.report.test_pictures import OUTCOME
from trainer.experiments import compare as library
from trainer.experiments.comparison import levels as compare_levels
from trainer.experiments.comparison.levels import find_data_sets
from trainer.experiments.comparison.report import report
from trainer.experiments.comparison.results import Outcome
from trainer.settings.comparison_settings import ComparisonSettings, UserLevels
from trainer.settings.train_settings import AUTO_LOSS

NUM_USERS, ROWS_KEPT = 60, {1: 60, 4: 200}
USERS = UserLevels(
    user_column="user",
    max_examples_per_user=tuple(ROWS_KEPT),
    num_users=NUM_USERS,
    num_examples=tuple(ROWS_KEPT.values()),
)
Make = Callable[..., ComparisonSettings]
_DOUBLE = pa.schema([("user", "string"), ("x", "float64"), ("label", "float32")])


@pytest.fixture
def make_settings(tmp_path: pathlib.Path) -> Make:
    """``make_settings(**changes)`` of a comparison on 400 rows of 60 users at most."""
    rng = np.random.default_rng(7)
    table = pa.table(
        {
            "user": [f"u{user}" for user in np.minimum(rng.zipf(1.4, 400), NUM_USERS)],
            "x": rng.normal(size=400).astype("f4"),
            "label": np.float32(np.arange(400) % 2),
        }
    )
    pq.write_table(table, tmp_path / "visits.parquet")
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    pq.write_table(table.slice(0, 50).drop(["user"]), held_out / "visits.parquet")

    def make(**changes: Any) -> ComparisonSettings:
        fields: dict[str, Any] = {
            "source": str(tmp_path / "visits.parquet"), "held_out": held_out,
            "out": tmp_path / "out", "seeds": 1, "trained": (PRIVATE,),
            "batches": (BatchSettings(expected_batch_size=20, num_epochs=1),),
            "samplers": ("truncated-poisson",), "users": USERS,
        }  # fmt: skip
        return ComparisonSettings(**{**fields, **changes})

    return make


def _bounded(folder: pathlib.Path) -> Any:
    return list_blocks(str(folder)).bounded


def test_both_levels_meet_one_epsilon_of_a_user_by_their_own_noise(
    make_settings: Make, work: Work
) -> None:
    outcomes = library.compare(make_settings()).outcomes
    told = [(one.sampled, one.max_examples_per_user) for one in outcomes]
    assert told == [("rows", 1), ("users", 1), ("rows", 4), ("users", 4)]
    for one in outcomes:
        assert one.guarantee == "proven"
        assert one.rows_per_step == 20
        count = 1 if one.sampled == "users" else one.max_examples_per_user
        slots = NUM_USERS
        if one.sampled == "rows":
            slots = ROWS_KEPT[one.max_examples_per_user or 0]
        batches = BatchSettings(
            expected_batch_size=one.expected_batch_size, num_epochs=1, delta=1e-3
        )
        found = accountant.delta(
            batches.plan(slots),
            noise_multiplier=one.noise_multiplier or 0.0,
            epsilon=2.0,
            max_examples_per_user=count or 0,
        )
        # Nor is there much more noise than is needed.
        assert 0.9e-3 < found.guarantee <= 1e-3
    # The unit of four rows needs more noise than that of one record.
    assert (outcomes[2].noise_multiplier or 0) > 1.2 * (
        outcomes[3].noise_multiplier or 9
    )


def test_a_loss_is_found_beside_ids_that_are_text(
    make_settings: Make, work: Work
) -> None:
    auto = dataclasses.replace(PRIVATE, loss=AUTO_LOSS)
    one = dataclasses.replace(USERS, max_examples_per_user=(4,), num_examples=(200,))
    library.compare(make_settings(trained=(auto,), users=one))
    assert len(work.runs) == 2


def test_text_is_refused_with_commands_that_make_a_table_of_it(
    make_settings: Make, tmp_path: pathlib.Path
) -> None:
    settings = make_settings()
    (tmp_path / "visits.csv").write_text("user,x,label\nu1,0.5,1\n")
    text = dataclasses.replace(settings, source=str(tmp_path / "visits.csv"))
    with pytest.raises(InputError, match=r"visits.csv to be Parquet .*--keep-users"):
        library.compare(text)
    assert not settings.out.exists()


def test_rows_and_users_are_drawn_equally_often(make_settings: Make) -> None:
    data_sets = find_data_sets(make_settings())
    rates = [
        each.settings.batches[0].plan(each.num_examples).sampling_probability
        for each in data_sets
    ]
    assert rates == [rates[0], rates[0], rates[2], rates[2]]
    assert [each.settings.batches[0].expected_batch_size for each in data_sets] == [
        20, 20, 20, 6,
    ]  # fmt: skip


def test_tables_are_bounded_once_and_shared(make_settings: Make, work: Work) -> None:
    settings = make_settings(seeds=2)
    library.compare(settings)
    folder = settings.out / "tables"
    names = ["rows-k1", "rows-k4", "users-k1", "users-k4"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        found = _bounded(folder / name)
        assert f"{found.sampled}-k{found.max_examples_per_user}" == name
    assert _bounded(folder / "users-k4").num_examples == NUM_USERS
    keys = {name: _bounded(folder / name).key for name in names}
    assert len(work.batches) == len(work.runs) == 8
    library.compare(settings)
    assert {name: _bounded(folder / name).key for name in names} == keys
    assert len(work.batches) == len(work.runs) == 8


def test_a_comparison_of_users_that_was_stopped_goes_on(
    make_settings: Make, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_bound, made = compare_levels.bound, list[str]()

    def stop(source: str, folder: pathlib.Path, asked: Any) -> None:
        if len(made) == 2:
            raise StoppedError("Stopped.")
        made.append(folder.name)
        true_bound(source, folder, asked)

    settings = make_settings()
    monkeypatch.setattr(compare_levels, "bound", stop)
    with pytest.raises(StoppedError):
        library.compare(settings)
    assert not work.batches
    monkeypatch.setattr(compare_levels, "bound", true_bound)
    longer = dataclasses.replace(
        USERS, max_examples_per_user=(1, 4, 5), num_examples=(60, 200, 220)
    )
    assert len(library.compare(make_settings(users=longer)).outcomes) == 6
    assert made == ["rows-k1", "users-k1"]
    assert len(work.runs) == 6


def test_a_table_that_was_bounded_otherwise_is_refused(
    make_settings: Make, work: Work
) -> None:
    library.compare(make_settings())
    made = len(work.runs)
    other = dataclasses.replace(USERS, num_examples=(60, 210))
    with pytest.raises(InputError, match="rows-k4 to be bounded as requested"):
        library.compare(make_settings(users=other))
    assert len(work.runs) == made


def test_slots_that_are_not_given_always_suffice() -> None:
    users = dataclasses.replace(USERS, num_examples=(), max_examples_per_user=(2, 9))
    found = {level.name: level.num_examples for level, _ in users.levels(400, 20)}
    # Of 60 users; of 400 rows.
    assert found == {"rows-k2": 120, "users-k2": 60, "rows-k9": 400, "users-k9": 60}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samplers": ("dynamic-shuffle",)}, "to draw each example indep.*--samp"),
        ({"users": {"max_examples_per_user": (1, 51)}}, "max_examples_per_user=51 <= "),
        ({"held_out": lambda table: table}, "no training examples"),
        (
            {"held_out": lambda table: table.cast(_DOUBLE)},
            "column x of .* to be float32 .*; it is double",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_made(
    changes: dict[str, Any], message: str, make_settings: Make, work: Work
) -> None:
    if "users" in changes:
        changes = {"users": dataclasses.replace(USERS, **changes["users"])}
    if "held_out" in changes:
        source = pathlib.Path(make_settings().source)
        table = changes["held_out"](pq.read_table(source))
        (source.parent / "test").mkdir()
        pq.write_table(table, source.parent / "test" / "a.parquet")
        changes = {"held_out": source.parent / "test"}
    with pytest.raises(InputError, match=message):
        library.compare(make_settings(**changes))
    assert not make_settings().out.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampled": ("people",)}, "sampled='people' to be one of rows, users"),
        ({"max_examples_per_user": (), "num_examples": ()}, "got none"),
        ({"max_examples_per_user": (0, 1)}, "max_examples_per_user=0 >= 1"),
        ({"num_users": 0}, "num_users=0 >= 1"),
        ({"num_examples": (5,)}, "to be 2 numbers, one for each .*; got 1"),
    ],
)
def test_levels_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(USERS, **changes)


def _outcome(sampled: str, most: int) -> Outcome:
    size = 20 if sampled == "rows" else 20 // most
    return dataclasses.replace(
        OUTCOME, expected_batch_size=size, sampled=sampled, rows_per_step=20,
        max_examples_per_user=most,
    )  # fmt: skip


def test_a_line_of_each_level_is_drawn_against_the_rows_of_a_user(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda one, *_, **__: drawn.append(one))
    found = report(
        [_outcome(sampled, most) for sampled in ("rows", "users") for most in (1, 5)]
    )
    found.write(tmp_path)
    [figure] = drawn
    assert list(found.draw) == ["comparison.png"]
    [panel] = figure.axes  # sizes of steps of users are no question of their own
    assert panel.get_xlabel() == "rows of a user at most"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "truncated-poisson, rows sampled",
        "truncated-poisson, users sampled",
    ]
    text = (tmp_path / "comparison.md").read_text()
    assert "epsilon 3, batch size 20, 1 epoch" in text
    assert "| sampled | k | batches | size | noise |" in text
    assert "| users | 5 | truncated-poisson | 4 |" in text
    assert "eps is for a user" in text
    fields = json.loads((tmp_path / "comparison.json").read_bytes())
    assert [each["sampled"] for each in fields] == ["rows", "rows", "users", "users"]
