"""`dpsgd.fit` and `dpsgd.predict` of tables in memory."""

from __future__ import annotations

import os
import pathlib
import select
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpsgd
from accounting.core.validation import InputError
from dpsgd import fit_stages, frames
from pipelines.cli import data_body


def people(num_rows: int = 600) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    age = rng.integers(17, 90, num_rows)
    return pd.DataFrame(
        {
            "age": age,
            "visits": rng.poisson(3, num_rows),
            "job": rng.choice(["clerk", "executive", None], num_rows),
            "joined": pd.to_datetime(rng.integers(0, 10**9, num_rows), unit="s"),
            "income": np.where(rng.random(num_rows) < (age - 17) / 80, "high", "low"),
        }
    )


HOW = {
    "epsilon": 8.0,
    "classes": ["low", "high"],
    "ranges": {"age": (17, 90)},
    "rows_are_independent": True,
    "train": "--hidden 4",
    "epochs": 1,
}


@pytest.mark.usefixtures("typed", "warm_starts")
def test_a_data_frame_is_fitted_and_predicted(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = people(), tmp_path / "fit"
    found = dpsgd.fit(table, "income", out=out, **HOW)
    # A tenth of the rows, which is too few to find the range of `visits`.
    assert " rows of the part `val` are fewer than " in capsys.readouterr().err
    assert not (out / "ranges.toml").exists()
    assert found["privacy"]["epsilon"] <= 8
    assert pathlib.Path(found["page"]).exists()
    new = table.sample(50, random_state=0).drop(columns="income")
    new["unused"] = [(1, "a")] * len(new)
    scores = dpsgd.predict(found["run"], new)
    assert isinstance(scores, pd.DataFrame)
    assert (scores.index == new.index).all()
    del new["unused"]
    assert set(scores["predicted"]) <= {"low", "high"}
    arrow = dpsgd.predict(found["run"], pa.Table.from_pandas(new))
    assert arrow["probability"].to_pylist() == scores["probability"].tolist()
    # The same call makes nothing again; another table is refused.
    assert dpsgd.fit(table, "income", out=out, **HOW) == found
    with pytest.raises(InputError, match="this is another one"):
        dpsgd.fit(people(601), "income", out=out, **HOW)


@pytest.mark.parametrize(
    ("table", "choices", "told"),
    [
        (people(9), {"rows_are_independent": False}, "--user COLUMN"),
        (people(9), {"epocs": 1}, "Did you mean epochs?"),
        (pd.DataFrame({"a": [1, "canary"]}), {}, "column a to hold values of one type"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), {}, "found 'a' twice"),
        (people(9).assign(t=pd.Timedelta(1, "h")), {"numeric": ["t"]}, "its seconds"),
        (people(9), {"ranges": {"age": (0, 1, 2)}}, "got (0, 1, 2)"),
        (people(9), {"classes": None}, "the classes of the label income"),
        ([1, 2], {}, "got list"),
    ],
)
def test_what_is_wrong_is_one_line(
    table: object,
    choices: dict[str, object],
    told: str,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(InputError) as caught:
        dpsgd.fit(table, "income", out=tmp_path / "out", **{**HOW, **choices})
    assert "\n" not in str(caught.value)
    said = str(caught.value) + capfd.readouterr().err  # of a stage
    assert told in said
    assert "canary" not in said


def test_what_pandas_has_becomes_what_a_table_takes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(frames, "made", lambda options: asked.append(options) or {})
    table = people(9)
    table["group"] = pd.cut(table["age"], [0, 30, 100])
    table["sparse"] = pd.arrays.SparseArray([0.0] * 9)
    table["month"] = table["joined"].dt.to_period("M")
    table["mixed"] = [1, "canary"] + [None] * 7
    dpsgd.fit(
        table, "income", out=tmp_path / "out", epsilon=3, classes=np.array(["low"]),
        numeric=table.columns[:1], category=None, drop=["mixed", "job"],
        train=["--hidden", "4"],
        ranges={"joined": (pd.Timestamp("2000-01-01 12:30"), pd.Timestamp(2030, 1, 1))},
    )  # fmt: skip
    [options] = asked
    assert (options.classes, options.numeric, options.drop) == ("low", "age", "job")
    assert options.train == "--hidden 4"
    name, ends = data_body._range(options.ranges[0])
    assert (name, str(ends[0])) == ("joined", "2000-01-01 12:30:00")
    stored = pq.read_table(options.table)
    assert "mixed" not in stored.column_names
    assert stored["group"].to_pylist()[0] in ("(0, 30]", "(30, 100]")
    assert pa.types.is_timestamp(stored.schema.field("month").type)
    # Nothing was made: a table that was mended takes the place of the first.
    dpsgd.fit(people(8), "income", out=tmp_path / "out", epsilon=3)
    assert pq.read_metadata(asked[1].table).num_rows == 8


def test_a_stage_ends_with_the_process_that_started_it(tmp_path: pathlib.Path) -> None:
    ready = tmp_path / "ready"
    stage = f"echo $$ > {ready}.new; mv {ready}.new {ready}; read < {tmp_path}/never"
    os.mkfifo(tmp_path / "never")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{stage}\n")
    python.chmod(0o755)
    fit = (
        "import sys; from trainer.cli.demo import run_stage; "
        f"sys.executable = {str(python)!r}; run_stage(1, 1, 'wait', ['demo'])"
    )
    with subprocess.Popen([sys.executable, "-c", fit]) as process:
        while not ready.exists():
            assert process.poll() is None
        ended = os.pidfd_open(int(ready.read_text()))
        process.kill()
    assert select.select([ended], [], [], 60)[0]


def test_a_part_of_too_few_rows_or_none_gives_no_ranges(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = [f"[columns.{name}]\nkind = {kind}" for name, kind in (
        ("age", '"numeric"'), ("y", '"label"\ntask = "binary"'),
    )]  # fmt: skip
    (tmp_path / "schema.toml").write_text("\n".join(["version = 1", *columns]))
    for part, count in (("train", 10), ("val", 0)):
        (tmp_path / "first" / part).mkdir(parents=True)
        rows = pa.table({"age": np.zeros(count, "f4"), "label": np.zeros(count, "i1")})
        pq.write_table(rows, tmp_path / "first" / part / "part-00000.parquet")
    asked = fit_stages.FitOptions(epsilon=3.0, delta=1e-5)
    sizes = fit_stages._Sizes.of(tmp_path / "first", asked)
    assert fit_stages._ranges(tmp_path, sizes, tmp_path / "first", 1).is_done
    assert "no ranges: 0 rows of the part `val` are fewer" in capsys.readouterr().err
