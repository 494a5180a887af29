"""The predicted class, and names of classes, in columns of predictions."""

from __future__ import annotations

import pathlib
import shlex
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import dpsgd
from trainer.model.metrics import CLASSES
from trainer.prediction.predict import PREDICTED, with_classes

NAMES = ("red", "<green>", "dark blue")
ROWS = np.array([[0.1, 0.5, 0.4], [0.4, 0.2, 0.4], [0.2, 0.2, 0.6]])


def test_the_columns_of_classes_have_their_names() -> None:
    found = with_classes({"probabilities": ROWS, "stddev": ROWS / 9}, CLASSES, NAMES)
    assert list(found) == [
        PREDICTED,
        "probability_red", "probability_<green>", "probability_dark blue",
        "stddev_red", "stddev_<green>", "stddev_dark blue",
    ]  # fmt: skip
    # Of equal classes the first.
    assert found[PREDICTED].tolist() == ["<green>", "red", "dark blue"]
    for number, name in enumerate(NAMES):
        np.testing.assert_array_equal(found[f"probability_{name}"], ROWS[:, number])


def test_a_table_of_named_classes_goes_all_the_way(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    lines = [
        f"{age},{NAMES[age // 31]}" for age in random.integers(0, 93, 400).tolist()
    ]
    (tmp_path / "a.csv").write_text("\n".join(["age,colour", *lines]))
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> Any:
        done = CliRunner().invoke(dpsgd.cli, shlex.split(line))
        assert done.exit_code == 0, done.output
        return done

    call("schema a.csv --label colour --classes 'red,<green>,dark blue' --numeric age")
    call("prepare --input a.csv --schema schema.toml --out data")
    call("batches --input data/train --out batches --batch-size 40 --epochs 2")
    call("train --batches batches --eval data/test --out run --noise-multiplier 1 "
         "--delta 1e-4 --keep-last 2")  # fmt: skip
    for more in ("", "--average omv", "--uncertainty 0.9"):
        out = f"p{len(more)}.parquet"
        said = call(f"predict run --input a.csv --carry colour --out {out} {more}")
        found = pq.read_table(out)
        assert f"columns colour, {PREDICTED}" in said.output
        kind = "vote_share" if "omv" in more else "probability"
        values = np.array([found[f"{kind}_{name}"] for name in NAMES])
        assert [NAMES[each] for each in values.argmax(0)] == found[
            PREDICTED
        ].to_pylist()
        np.testing.assert_allclose(values.sum(0), 1, rtol=1e-5)
    wrong = ["predict", "run", "--input=a.csv", "--out=q", "--carry=probability_red"]
    refused = CliRunner().invoke(dpsgd.cli, wrong)
    assert "not to be called as a prediction" in str(refused.exception)
