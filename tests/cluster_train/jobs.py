"""Inputs of the runs, their commands, and what they end with."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import numpy as np

from pipelines.sampling.keys import create_key_file
from tests.benchmarks.kills import results
from tests.trainer.conftest import make_rows, write_batches, write_held_out

#: Runs draw ids of their own; here they have to be the same run.
_RUN_ID = "5" * 32
#: With them the default model has 213,000 weights.
_BUCKETS = 1000
_DATASET = {"name": "criteo", "num_buckets": [_BUCKETS] * 26}


@dataclasses.dataclass(frozen=True)
class Input:
    """Batches, held-out examples and a key.

    Attributes:
      folder: Of all of it.
      batch_size: Expected examples of a step.
      num_steps: Steps of the plan.
    """

    folder: pathlib.Path
    batch_size: int
    num_steps: int

    def arguments(self, run: pathlib.Path, *more: str) -> list[str]:
        """Returns arguments of `dpsgd train` for a new run, which has the one id.

        Args:
          run: New folder.
          *more: Further arguments.
        """
        (run / "private").mkdir(parents=True, mode=0o700)
        (run / "private" / "run.id").write_text(_RUN_ID + "\n")
        return [
            f"--batches={self.folder / 'batches'}",
            f"--eval={self.folder / 'held_out'}",
            f"--noise-key-file={self.folder / 'noise.key'}",
            f"--out={run}",
            f"--csv={run}.csv",
            "--noise-multiplier=0.8",
            "--delta=1e-6",
            "--l2-norm-clip=1",
            f"--eval-every={max(1, self.num_steps // 10)}",
            *more,
        ]


def make_input(
    folder: pathlib.Path, *, batch_size: int, num_steps: int, parts: int, gaps: bool
) -> Input:
    """Writes the input of runs.

    Args:
      folder: New.
      batch_size: Expected examples of a step.
      num_steps: Steps of the plan.
      parts: Physical batches of a step.
      gaps: Whether some of them, and a whole step, hold nothing but padding.
    """
    draw = np.random.default_rng(1)
    sizes = draw.binomial(8 * batch_size, 1 / 8, num_steps)
    if gaps:
        sizes[1::7] = batch_size // 4
        sizes[3] = 0
    rows = make_rows(2 * batch_size)
    rows["categories"] = draw.integers(0, _BUCKETS, rows["categories"].shape)
    largest = 9 * batch_size // 8
    write_batches(
        folder / "batches",
        [rows[: min(size, largest)] for size in sizes],
        dataset=_DATASET,
        expected_batch_size=batch_size,
        truncated_batch_size=largest,
        physical_batch_size=largest // parts,
        num_examples=1000 * batch_size,
    )
    write_held_out(folder / "held_out", make_rows(300, seed=99), _DATASET)
    create_key_file(folder / "noise.key")
    return Input(folder, batch_size, num_steps)


def same(left: pathlib.Path, right: pathlib.Path) -> bool:
    """Whether two finished runs have the same weights, metrics and statement."""
    return results(left) == results(right)


def num_evaluations(run: pathlib.Path) -> int:
    """How often a run has been evaluated: once before the first step."""
    curve = pathlib.Path(f"{run}.csv")
    return len(curve.read_text().splitlines()) - 1 if curve.exists() else 0


def speed(log: str, given: Input) -> float:
    """Examples per second, by the last line of progress of a run from its start.

    Args:
      log: What `dpsgd train` printed.
      given: Its input.
    """
    found = re.findall(r"training: step .* ([\d.]+) steps/s", log)
    return float(found[-1]) * given.batch_size
