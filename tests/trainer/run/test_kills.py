"""Runs that are killed at random moments end as others: a few of hundreds.

``python -m tests.benchmarks.kills --kills 300`` does the others.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.thorough
def test_killed_runs_end_bit_identical() -> None:
    # A process of its own: it must not have used TensorFlow when it forks.
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.kills", "--kills=3",
         "--only", "logical-batches", f"--seed={np.random.default_rng().integers(99)}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads(done.stdout.splitlines()[-1])
    assert totals["kills"] == 3
    assert totals["runs"] >= 1
    assert totals["different"] == 0
