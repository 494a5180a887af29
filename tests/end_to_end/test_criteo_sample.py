"""The whole path on real rows, command by command."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess

import pytest

from tests.criteo import write_schema
from tests.warm_processes import warm_python

pytestmark = pytest.mark.slow

BUDGET = ("--epsilon=3", "--delta=1e-4")
TRAIN = (
    "train", "--batches=batches", "--eval=data/test", "--l2-norm-clip=1", *BUDGET,
    "--embedding-dim=2", "--hidden=8", "--optimizer=sgd", "--learning-rate=0.1",
)  # fmt: skip


def succeed(folder: pathlib.Path, *arguments: str) -> str:
    """Runs a command that must succeed; returns standard output."""
    result = subprocess.run(
        [warm_python(), "-m", "dpsgd", *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def finished(
    criteo_sample: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """A folder with data, batches and a finished run.  Not to be changed."""
    folder = tmp_path_factory.mktemp("criteo")
    write_schema(folder / "schema.toml", 200)
    succeed(
        folder, "prepare", f"--input={criteo_sample}", "--schema=schema.toml",
        "--out=data", "--row-group-rows=500",
    )  # fmt: skip
    succeed(
        folder, "batches", "--input=data/train", "--out=batches", "--batch-size=100",
        "--epochs=2", "--physical-batch-size=64", *BUDGET,
    )  # fmt: skip
    succeed(folder, *TRAIN, "--out=run")
    return folder


def test_the_chain_agrees_from_text_to_epsilon(finished: pathlib.Path) -> None:
    manifest = json.loads((finished / "batches/manifest.json").read_bytes())
    plan = manifest["plan"]
    # 1,999 rows; 80 % train; two epochs of 16 steps.
    assert plan["num_examples"] == 1599
    assert plan["num_steps"] == 32
    stated = json.loads(succeed(finished, "account", "run", "--json"))
    written = json.loads((finished / "run/privacy.json").read_bytes())
    assert stated == written
    text = json.dumps(stated)
    for value in ("zero-out", "truncated", "upper"):
        assert value in text
    metrics = json.loads((finished / "run/metrics.json").read_bytes())
    assert metrics["num_examples"] == 200
    assert 0 < metrics["log_loss"] < 5


def test_nothing_public_holds_a_key_or_a_count_of_real_rows(
    finished: pathlib.Path,
) -> None:
    secrets = [path.read_text().strip() for path in finished.glob("*/private/*.key")]
    assert len(secrets) == 1  # the sampling key: the secret of noise is never written
    checksums = json.loads((finished / "batches/private/checksums.json").read_bytes())
    counts = {str(file["num_real"]) for file in checksums["files"].values()}
    # Chance may make one of them a number that is public anyway.
    counts.discard("200")  # held-out rows
    plan = json.loads((finished / "batches/manifest.json").read_bytes())["plan"]
    counts -= set(map(str, plan.values()))  # the cap of a step: known before sampling
    for path in finished.rglob("*.*"):
        inside = path.relative_to(finished).parts
        if not path.is_file() or "private" in inside or inside[0] == "data":
            continue
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in secrets), path
        if path.suffix == ".json":
            # Whole ones: digits within a digest are some count in one run of twenty.
            numbers = set(re.findall(r"(?<![\w.])\d+(?![\w.])", data.decode()))
            assert not numbers & {c for c in counts if int(c) > 64}, path
