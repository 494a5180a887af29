"""Seconds of a training step, beside those of another commit, in one run."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
_BENCHMARK = pathlib.Path("tests") / "benchmarks" / "trainer_step.py"

#: Parameters -> way to train -> the ratio to a Keras step, in wall time.
Ratios = dict[int, dict[str, float]]


def _measured(tree: pathlib.Path) -> Ratios:
    """Runs a tree's benchmark in a process of its own."""
    command = [sys.executable, str(tree / _BENCHMARK), "--json"]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        one["parameters"]: {name: r["wall"] for name, r in one["ratios"].items()}
        for one in found
    }


def beside(base: str, rounds: int) -> Iterator[str]:
    """Yields a line for each size and way: the medians of both trees, in turn.

    Args:
      base: A commit of this repository.
      rounds: Runs of each tree.
    """
    with tempfile.TemporaryDirectory() as temporary:
        other = pathlib.Path(temporary) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(other), base], check=True)
        try:
            found = [(_measured(other), _measured(ROOT)) for _ in range(rounds)]
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    for size, ways in found[0][0].items():
        for way in ways:
            before, now = (
                statistics.median(pair[side][size][way] for pair in found)
                for side in (0, 1)
            )
            yield f"{size:,} parameters, {way}: {before:.3f} at {base}, {now:.3f} here"
