"""A table of one's own, from CSV to a private model: five commands and no code."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dpsgd.command_line import cli

NUM_ROWS = 4000
JOBS = ("clerk", "executive", "farmer", "?")
SCHOOLS = ("HS-grad", "Bachelors", "Masters")


def write_census(path: pathlib.Path) -> None:
    """Rows in the manner of the Adult census, made up, with an AUC of about 0.85."""
    random = np.random.default_rng(0)
    age = random.integers(17, 90, NUM_ROWS)
    job, school = (
        random.integers(0, len(names), NUM_ROWS) for names in (JOBS, SCHOOLS)
    )
    joined = random.integers(2000, 2024, NUM_ROWS)
    effects = np.array([0, 2, -2, 0])[job] + np.array([-1, 0, 1.5])[school]
    odds = -1 + effects + 0.05 * (age - 50)
    rich = random.random(NUM_ROWS) * (1 + np.exp(-odds)) < 1
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["", "age", "workclass", "education", "joined", "remark", "income"]
        writer.writerow(names)
        for row in range(NUM_ROWS):
            years = age[row] if row % 9 else ""
            words = "Paid late, twice" if row % 2 else "Nothing."
            income = ">50K" if rich[row] else "<=50K"
            known = (JOBS[job[row]], SCHOOLS[school[row]])
            day = f"{joined[row]}-03-04"
            writer.writerow([row, years, *known, day, words, income])


def dpsgd(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_five_commands_lead_from_a_csv_to_a_private_model(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_census(tmp_path / "census.csv")
    told = dpsgd(
        "schema", "census.csv", "--label=income", "--classes=<=50K,>50K",
        "--numeric=age", "--category=workclass,education", "--date=joined",
        "--text=remark", "--json",
    )  # fmt: skip
    assert told["looked_at"] == "names and types, no value"
    assert told["to_be_chosen"] == 0
    summary = dpsgd(
        "prepare", "--input=census.csv", "--schema=schema.toml", "--out=data", "--json"
    )
    assert summary["rows"] == {"train": 3200, "val": 400, "test": 400}
    dpsgd(
        "batches", "--input=data/train", "--out=batches", "--batch-size=128",
        "--epochs=4", "--json",
    )  # fmt: skip
    trained = dpsgd(
        "train", "--batches=batches", "--eval=data/test", "--out=run", "--epsilon=3",
        "--delta=1e-5", "--embedding-dim=4", "--hidden=16",
        "--eval-every=200", "--json",
    )  # fmt: skip
    # The law itself has 0.9; five standard deviations of chance, at 400 rows, are 0.15.
    assert trained["metrics"]["auc"] > 0.75
    # New rows need no preparing: the raw table gives what its prepared rows give.
    dpsgd("predict", "run", "--input=data/test", "--out=prepared.parquet", "--json")
    told = dpsgd(
        "predict", "run", "--input=census.csv", "--out=raw.parquet", "--carry=remark",
        "--carry=", "--json",
    )  # fmt: skip
    assert told["columns"] == ["remark", "", "predicted", "probability"]
    prepared, raw = (pq.read_table(f"{name}.parquet") for name in ("prepared", "raw"))
    assert raw[""].to_pylist() == [str(row) for row in range(NUM_ROWS)]
    np.testing.assert_allclose(raw["probability"][-400:], prepared["probability"], 1e-5)
    assert np.std(prepared["probability"]) > 0.1
    rich = np.asarray(prepared["probability"]) > 0.5
    assert prepared["predicted"].to_pylist() == [
        ">50K" if each else "<=50K" for each in rich
    ]
