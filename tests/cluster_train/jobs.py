"""Inputs of the runs, their commands, and what they end with."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time

import numpy as np

from tests.benchmarks.kills import results
from tests.criteo import described
from tests.engines.harness.hosts import Process
from tests.engines.harness.polling import wait_for
from tests.trainer.conftest import make_rows, write_batches, write_held_out
from trainer.core.run.checkpoints import FOLDER_NAME

#: With them the default model has 213,000 weights.
BUCKETS = 1000
#: Of Zipf's law for categories: 65,536 examples have 184,000 distinct ones in 26
#: columns; of Criteo's, 133,000.
_ZIPF = 1.3
#: Steps that have rows of their own; then they come again.
_FRESH_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Input:
    """Batches and held-out examples.

    Attributes:
      folder: Of all of it.
      batch_size: Expected examples of a step.
      num_steps: Steps of the plan.
      num_evaluations: After the first step.
      more: Arguments of `dpsgd train` for all runs.
    """

    folder: pathlib.Path
    batch_size: int
    num_steps: int
    num_evaluations: int
    more: tuple[str, ...] = ()

    def arguments(self, run: pathlib.Path, *more: str) -> list[str]:
        """Returns arguments of `dpsgd train` for a new run.

        Args:
          run: New folder.
          *more: Further arguments.
        """
        every = self.num_steps // self.num_evaluations
        return [
            f"--batches={self.folder / 'batches'}",
            f"--eval={self.folder / 'held_out'}",
            f"--out={run}",
            "--noise-multiplier=0.8",
            "--delta=1e-6",
            "--l2-norm-clip=1",
            f"--eval-every={every}",
            f"--checkpoint-every={every}",  # tells how far a run is
            *self.more,
            *more,
        ]


def make_input(
    folder: pathlib.Path,
    *,
    batch_size: int,
    num_steps: int,
    parts: int,
    gaps: bool = False,
    num_buckets: int = BUCKETS,
    num_evaluations: int = 10,
    more: tuple[str, ...] = (),
) -> Input:
    """Writes the input of runs.

    Args:
      folder: New.
      batch_size: Expected examples of a step.
      num_steps: Steps of the plan.
      parts: Physical batches of a step.
      gaps: Whether some of them, and a whole step, hold nothing but padding.
      num_buckets: Rows of each of the 26 tables.
      num_evaluations: After the first step.
      more: Arguments of `dpsgd train` for all runs.
    """
    dataset = described(num_buckets)
    draw = np.random.default_rng(1)
    sizes = draw.binomial(8 * batch_size, 1 / 8, num_steps)
    if gaps:
        sizes[1::7] = batch_size // 4
        sizes[3] = 0
    rows = make_rows((_FRESH_STEPS + 1) * batch_size)
    rows["categories"] = draw.zipf(_ZIPF, rows["categories"].shape) % num_buckets
    largest = 9 * batch_size // 8
    write_batches(
        folder / "batches",
        [
            rows[step % _FRESH_STEPS * batch_size :][: min(size, largest)]
            for step, size in enumerate(sizes)
        ],
        dataset=dataset,
        expected_batch_size=batch_size,
        truncated_batch_size=largest,
        physical_batch_size=largest // parts,
        num_examples=1000 * batch_size,
    )
    write_held_out(folder / "held_out", make_rows(300, seed=99), dataset)
    return Input(folder, batch_size, num_steps, num_evaluations, more)


_OF_CLAIMS = ("privacy.json", "privacy.txt", "run_record.json")


def same(left: pathlib.Path, right: pathlib.Path) -> bool:
    """Whether two finished runs have the same weights, metrics and epsilon."""
    found = [results(run) for run in (left, right)]
    epsilons = {json.loads(each["privacy.json"])["epsilon"] for each in found}
    # Several workers are a claim, which record and statement name.
    rest = [{n: v for n, v in each.items() if n not in _OF_CLAIMS} for each in found]
    return len(epsilons) == 1 and rest[0] == rest[1]


def num_evaluations(run: pathlib.Path) -> int:
    """How often a run was evaluated, by its checkpoint: once before the first step."""
    commits = sorted((run / "private" / FOLDER_NAME).glob("*.json"))
    return (
        len(json.loads(commits[-1].read_text())["public"]["points"]) if commits else 0
    )


def speed(job: Process, run: pathlib.Path, given: Input) -> float:
    """Returns examples per second of a run, after its first evaluation of a step.

    What is compiled is compiled by then; evaluations, checkpoints and flushes count.

    Args:
      job: That trains.
      run: Its folder.
      given: Its input.
    """

    def reach(evaluation: int) -> float:
        name = f"evaluation {evaluation} of {run}"
        wait_for(
            name,
            lambda: num_evaluations(run) > evaluation or not job.running(),
            600,
        )
        return time.monotonic()

    seconds = -reach(1) + reach(given.num_evaluations)
    share = 1 - 1 / given.num_evaluations
    return share * given.num_steps * given.batch_size / seconds
