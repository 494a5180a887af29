"""`dpsgd.fit` and `dpsgd.predict` of tables in memory."""

from __future__ import annotations

import pathlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import dpsgd
from accounting.core.validation import InputError


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
    new = table.head(50).drop(columns="income")
    scores = dpsgd.predict(found["run"], new)
    assert isinstance(scores, pd.DataFrame)
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
        ([1, 2], {}, "got list"),
    ],
)
def test_what_is_wrong_is_one_line(
    table: object, choices: dict[str, object], told: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(InputError) as caught:
        dpsgd.fit(table, "income", out=tmp_path / "out", **{**HOW, **choices})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "canary" not in str(caught.value)
