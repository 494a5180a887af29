"""The whole path on real rows, and what it leaves for everybody to read."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable

import pytest

from tests.criteo import write_schema


@pytest.mark.slow
def test_nothing_public_holds_a_key_or_a_count_of_real_rows(
    criteo_sample: pathlib.Path, tmp_path: pathlib.Path, typed: Callable[..., str]
) -> None:
    budget = "--epsilon=3", "--delta=1e-4"
    write_schema(tmp_path / "schema.toml", 200)
    typed(
        "prepare", f"--input={criteo_sample}", "--schema=schema.toml", "--out=data",
        "--row-group-rows=500",
    )  # fmt: skip
    typed(
        "batches", "--input=data/train", "--out=batches", "--batch-size=100",
        "--epochs=2", "--physical-batch-size=64", *budget,
    )  # fmt: skip
    typed(
        "train", "--batches=batches", "--eval=data/test", "--out=run", *budget,
        "--l2-norm-clip=1", "--embedding-dim=2", "--hidden=8", "--optimizer=sgd",
        "--learning-rate=0.1",
    )  # fmt: skip
    secrets = [path.read_text().strip() for path in tmp_path.glob("*/private/*.key")]
    assert len(secrets) == 1  # the sampling key: the secret of noise is never written
    checksums = json.loads((tmp_path / "batches/private/checksums.json").read_bytes())
    counts = {str(file["num_real"]) for file in checksums["files"].values()}
    # Chance may make one of them a number that is public anyway.
    counts.discard("200")  # held-out rows
    plan = json.loads((tmp_path / "batches/manifest.json").read_bytes())["plan"]
    # 1,999 rows; 80 % train; two epochs of 16 steps.
    assert (plan["num_examples"], plan["num_steps"]) == (1599, 32)
    counts -= set(map(str, plan.values()))  # the cap of a step: known before sampling
    for path in tmp_path.rglob("*.*"):
        inside = path.relative_to(tmp_path).parts
        if not path.is_file() or "private" in inside or inside[0] == "data":
            continue
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in secrets), path
        if path.suffix == ".json":
            # Whole ones: digits within a digest are some count in one run of twenty.
            numbers = set(re.findall(r"(?<![\w.])\d+(?![\w.])", data.decode()))
            assert not numbers & {c for c in counts if int(c) > 64}, path
