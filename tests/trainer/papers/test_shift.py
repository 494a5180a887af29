"""Rows in an order that shifts, and metrics of weights and averages over time."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.plan import DETERMINISTIC, DpSgdPlan
from accounting.core.validation import InputError
from pipelines.inputs.parquet_blocks import description_of
from pipelines.sampling.samplers import BlockRows, sample_block
from tests.trainer.conftest import make_rows, write_held_out
from tests.trainer.run.whole_runs import private_settings
from trainer.papers.drifting_table import (
    num_steps_of,
    order,
    shares,
    values_of,
    write,
)
from trainer.papers.settings import ShiftSettings
from trainer.papers.shift import Course, shift


def test_halves_take_turns_and_every_row_is_used_once() -> None:
    values = np.random.default_rng(0).permutation(1000).astype(float)
    found = order(values, batch_size=50, period=5, seed=0)
    assert len(found) == 1000
    assert len(set(found)) == 1000
    large = (values[found] >= 500).reshape(20, 50).sum(1)
    assert abs(large - 50 * shares(20, 5)).max() <= 1
    assert large.sum() == 500
    np.testing.assert_array_equal(large[:5], large[5:10])


def test_a_part_of_a_period_is_left_out_and_missing_values_are_small() -> None:
    values = np.where(np.arange(101) < 51, np.nan, 1.0)
    found = order(values, batch_size=10, period=4, seed=1)
    assert len(found) == 80
    # (1 - cos(pi/4)) / 2 = 0.146, 0.854: sums 1.46, 10, 18.5, 20 of the large.
    is_large = ~np.isnan(values[found])
    assert is_large.reshape(8, 10).sum(1).tolist() == [1, 9, 8, 2] * 2
    other = order(values, batch_size=10, period=4, seed=2)
    assert not np.array_equal(other, found)
    np.testing.assert_array_equal(~np.isnan(values[other]), is_large)


def test_less_than_two_periods_are_refused() -> None:
    assert num_steps_of(80, 10, 4) == 8
    with pytest.raises(InputError, match="79 rows; period=4 of batch_size=10 takes 40"):
        num_steps_of(79, 10, 4)


def test_deterministic_batches_keep_the_order() -> None:
    plan = DpSgdPlan(
        sampler=DETERMINISTIC, num_examples=80, expected_batch_size=10, num_steps=8,
        num_epochs=1,
    )  # fmt: skip
    block = BlockRows(name="a", first_row=0, num_rows=80)
    found = sample_block(plan, bytes(32), block, None)
    in_order = found.step[np.argsort(found.row)]
    np.testing.assert_array_equal(in_order, np.arange(80) // 10)


def test_a_table_is_written_in_its_order_with_its_description(
    tmp_path: pathlib.Path,
) -> None:
    rows = make_rows(200)
    source = write_held_out(tmp_path / "source", rows)
    out = tmp_path / "new" / "data"
    for _ in range(2):  # the second call finds it
        write(str(source), out, column="integers:0", batch_size=20, period=5)
    with pytest.raises(InputError, match="in the requested order"):
        write(str(source), out, column="integers:1", batch_size=20, period=5)
    found, before = pq.read_table(out), pq.read_table(source).schema
    assert found.schema.equals(before)
    told = description_of(found.schema, "")
    assert told == {**description_of(before, ""), "ordered_by": "integers:0"}
    values = np.nan_to_num(rows["integers"][:, 0].astype(float), nan=-np.inf)
    ranked = np.sort(values)
    first = np.array(found["integers"].to_pylist(), float)[:, 0]
    large = np.nan_to_num(first, nan=-np.inf).reshape(10, 20) > ranked[100]
    assert large[2].sum() >= 10  # half of the period
    assert large[[0, 4, 5, 9]].sum() <= 12


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("a:2", "Give a:INDEX"),
        ("c", "to be a column of numbers"),
    ],
)
def test_what_has_no_numbers_is_refused(column: str, message: str) -> None:
    lists = pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0, 3.0, 4.0]), 2)
    table = pa.table({"a": lists, "b": [1, 2], "c": ["x", "y"]})
    assert values_of(table, "a:1").tolist() == [2.0, 4.0]
    assert values_of(table, "b").tolist() == [1.0, 2.0]
    with pytest.raises(InputError, match=message):
        values_of(table, column)


def test_the_summary_is_of_the_last_period() -> None:
    values = np.array([[0.0, 0.5, 0.9, 0.7, 0.8], [0.0, 0.5, 0.7, 0.7, 0.8]])
    course = Course(
        weights="ema", steps=np.array([0, 4, 8, 12, 16]), values=values, period=8
    )
    fields = course.to_json()
    assert fields["last_period_mean"] == pytest.approx(0.75)
    assert fields["last_period_swing"] == pytest.approx(0.1)
    assert fields["final"] == pytest.approx(0.8)


def _settings(tmp_path: pathlib.Path, **changes: Any) -> ShiftSettings:
    fields: dict[str, Any] = {
        "source": str(tmp_path / "train"), "held_out": tmp_path / "held_out",
        "out": tmp_path / "out", "seeds": 1, "expected_batch_size": 20, "period": 5,
        "shift_by": "label", "data_is_public": True, "training": private_settings(),
    }  # fmt: skip
    return ShiftSettings(**{**fields, **changes})


def test_last_weights_and_averages_are_judged_along_the_way(
    lean_results: None, held_out: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    write_held_out(tmp_path / "train", make_rows(200))
    settings = _settings(tmp_path)
    found = shift(settings)
    (run,) = (settings.out / "runs").glob("*-seed0")
    metrics = json.loads((run / "metrics.json").read_text())
    stated = (run / "privacy.txt").read_text().replace("\n", " ")
    assert "the order of the rows" in " ".join(stated.split())
    assert [course.weights for course in found.courses] == ["last", "ema", "uta"]
    for course in found.courses:
        of = {"last": metrics, **metrics["aggregates"]}[course.weights]
        assert course.steps.tolist() == list(range(11))
        assert course.mean[-1] == of["auc"]
        assert course.mean[0] == found.courses[0].mean[0]  # all start there
    # Noise is random, and two averages may order the rows alike at one of the steps.
    assert len({tuple(course.mean) for course in found.courses}) == 3
    fields = found.write(settings.out)
    assert json.loads((settings.out / "shift.json").read_text()) == fields
    assert "NOT PRIVATE" in (settings.out / "shift.md").read_text()
