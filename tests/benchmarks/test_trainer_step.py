"""The benchmark of a step still runs, on a few steps of its small model."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.thorough
def test_it_trains_in_every_way(root: pathlib.Path) -> None:
    """Seen to fail: an argument that it gave was gone."""
    done = subprocess.run(
        [sys.executable, "tests/benchmarks/trainer_step.py", "--buckets=300",
         "--steps=1", "--rounds=1", "--json"],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seconds_per_step"].keys() == {"Keras", "DP-SGD", "BAM", "8 bands"}
    assert all(ratio["wall"] > 0 for ratio in found["ratios"].values())
