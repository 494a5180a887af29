"""Runs that are killed at random moments end complete, with files of their commits.

``python -m tests.benchmarks.kills --kills 300`` does more.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize(
    "given",
    [
        ["--kills=6", "--only", "sgd-lazy"],
        pytest.param(["--kills=100"], marks=pytest.mark.thorough),
    ],
    ids=["few", "many"],
)
def test_killed_runs_end_with_the_files_of_their_commits(given: list[str]) -> None:
    # A process of its own: it must not have used TensorFlow when it forks.
    seed = np.random.default_rng().integers(99)
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.kills", *given, f"--seed={seed}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads(done.stdout.splitlines()[-1])
    assert totals["kills"] >= int(given[0].partition("=")[2])
    assert totals["runs"] >= 1
    assert totals["wrong"] == 0
