"""Kills training runs at random moments and holds what they end with against others.

    python -m tests.benchmarks.kills --kills 300

For every configuration one run is left alone.  Then runs of the same request are killed
(SIGKILL) and the same request is given again, until a run completes; then the next one
begins, until so many kills were done.  A moment is drawn at random: in one of eight any
time before the first step; else some steps after the start of this process (up to
``_MOST_STEPS``), and any time within the two steps after; where the run has no more
steps, any time while results are written.  Weights, kept iterates, metrics, curves and
statements of a completed run have to be those of the undisturbed one, byte for byte.

A run is a child that is forked from this process, which has imported TensorFlow but
never used it: no context and no thread pool, which is checked before each fork.
So a restart costs no import; everything after the import is executed, and killed, as in
``dpsgd train``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its pool would not survive a fork

import h5py
import numpy as np

from pipelines.files.key_files import create_key_file
from tests.trainer.conftest import make_rows, write_batches, write_held_out
from tests.trainer.flat_settings import train_settings
from trainer.report.progress import Silent
from trainer.run.preflight import Request
from trainer.train import train

_FORK = multiprocessing.get_context("fork")
_NUM_STEPS = 400
#: Between two looks at the steps of a child.
_LOOK_SECONDS = 0.002
#: Steps that a process may do before it is killed.
_MOST_STEPS = 40
#: Share of the kills that come before the first step.
_EARLY = 1 / 8

#: name -> (settings, rows of a physical batch; None for one batch per step)
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int | None]] = {
    "sgd-lazy": (
        {"optimizer": "sgd", "embedding_noise": "lazy", "learning_rate": 0.5},
        None,
    ),
    "adam-cosine": (
        {
            "optimizer": "adam",
            "learning_rate_schedule": "cosine",
            "warmup_steps": 3,
            "learning_rate": 0.02,
        },
        None,
    ),
    "averages": (
        {
            "ema_decay": 0.9,
            "tail": 3,
            "train_over": "ema",
            "keep_last": 3,
            "uncertainty": 0.9,
        },
        None,
    ),
    "model-mix": (
        {
            "method": "model-mix",
            "mix_width": 0.1,
            "linf_factor": 4,
            "optimizer": "sgd",
            "learning_rate": 0.1,
        },
        None,
    ),
    "logical-batches": (
        {"optimizer": "sgd", "embedding_noise": "lazy", "ema_decay": None},
        6,
    ),
}


@dataclasses.dataclass
class Tally:
    """What was done to one configuration."""

    kills: int = 0
    kills_after_a_step: int = 0
    runs: int = 0
    different: int = 0
    seconds: float = 0.0


def make_inputs(folder: pathlib.Path) -> None:
    """Writes batches of both kinds, held-out examples and a key."""
    steps = [make_rows(4 + seed % 9, seed) for seed in range(_NUM_STEPS)]
    write_batches(folder / "whole", steps)
    write_batches(
        folder / "parts", steps, physical_batch_size=6, truncated_batch_size=None
    )
    write_held_out(folder / "held_out", make_rows(300, seed=99))
    create_key_file(folder / "noise.key")


def request(folder: pathlib.Path, name: str, run: pathlib.Path) -> Request:
    """Returns the request of a configuration, for a run with the one id of all."""
    changes, parts = CONFIGURATIONS[name]
    settings = train_settings(
        embedding_dim=2, hidden=(4,), noise_multiplier=0.8, l2_norm_clip=1.0,
        target_delta=1e-3, eval_every=70, **changes,
    )  # fmt: skip
    private = run / "private"
    private.mkdir(parents=True, mode=0o700)
    # Runs draw ids of their own; here they have to be the same run.
    (private / "run.id").write_text("5" * 32 + "\n")
    return Request(
        settings=settings,
        batches=folder / ("whole" if parts is None else "parts"),
        held_out=folder / "held_out",
        run=run,
        noise_key_file=folder / "noise.key",
        checkpoint_every=3,
    )


class _Steps(Silent):
    """Tells the parent where a child began, and how many steps of the run are done."""

    def __init__(self) -> None:
        self.first = _FORK.Value("q", -1, lock=False)
        self.done = _FORK.Value("q", 0, lock=False)

    def start(self, num_steps: int, done: int) -> None:
        """Reports the start of the steps."""
        self.done.value = self.first.value = done

    def advance(self, done: int) -> None:
        """Reports that ``done`` steps are done."""
        self.done.value = done

    @property
    def num(self) -> int:
        """Steps that the child has done."""
        return self.done.value - max(0, self.first.value)

    def reached(self, num_steps: int) -> bool:
        """Whether so many steps were done by the child, or all of the run's."""
        done = self.first.value >= 0 and self.done.value == _NUM_STEPS
        return self.num >= num_steps or done


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds that the parts of an undisturbed run take."""

    before_steps: float
    step: float
    after_steps: float


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a process is killed: after so many steps, and a share of what comes."""

    num_steps: int
    share: float
    spares_results: bool

    def seconds(self, pace: Pace, steps: _Steps) -> float | None:
        """Returns how long to wait when the steps are done; None to the end."""
        if self.num_steps == 0:
            return self.share * pace.before_steps
        if steps.done.value == _NUM_STEPS:
            return None if self.spares_results else self.share * pace.after_steps
        return self.share * 2 * pace.step


def draw_moment(draw: random.Random) -> Moment:
    """Returns the moment of a kill."""
    early = draw.random() < _EARLY
    num_steps = 0 if early else draw.randint(1, _MOST_STEPS)
    # Else a busy machine might never write results as fast as they are killed.
    return Moment(num_steps, draw.random(), draw.random() < 0.5)


def execute(asked: Request, moment: Moment, pace: Pace) -> tuple[int, int]:
    """Runs a request in a child, until it ends or its moment comes.

    Returns:
      The exit status, and the number of steps that were done.
    """
    child, steps = _start(asked)
    _wait(child, lambda: steps.reached(moment.num_steps))
    child.join(moment.seconds(pace, steps))
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode is not None  # it was joined
    return child.exitcode, steps.num


def execute_whole(asked: Request) -> Pace:
    """Runs a request in a child to its end, and returns how long its parts took."""
    times = [time.monotonic()]
    child, steps = _start(asked)
    for num_steps in (1, _NUM_STEPS):
        _wait(child, functools.partial(steps.reached, num_steps))
        times.append(time.monotonic())
    child.join()
    times.append(time.monotonic())
    if child.exitcode:
        raise RuntimeError("Expected the undisturbed run to succeed.")
    before, between, after = (b - a for a, b in itertools.pairwise(times))
    return Pace(before, between / (_NUM_STEPS - 1), after)


def _start(asked: Request) -> tuple[Any, _Steps]:
    _check_threads()
    steps = _Steps()
    child = _FORK.Process(target=train, args=(asked, steps))
    child.start()
    return child, steps


def _wait(child: Any, condition: Callable[[], bool]) -> None:
    """Waits until a condition holds or the child ends."""
    while not condition() and child.is_alive():
        child.join(_LOOK_SECONDS)


def _check_threads() -> None:
    """Accepts one thread, and one of jemalloc, which is made to be forked."""
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    names = sorted(task.read_text().strip() for task in tasks)
    others = [name for name in names if name != "jemalloc_bg_thd"]
    if len(others) != 1:
        raise RuntimeError(f"Expected one thread before a fork, not {others}.")


def results(run: pathlib.Path) -> dict[str, bytes]:
    """Returns what has to be the same: name -> bytes."""
    found = {
        str(path.relative_to(run)): path.read_bytes()
        for pattern in ("*.json", "*.txt", "*.parquet", "iterates/*.npz")
        for path in sorted(run.glob(pattern))
        if not path.name.startswith(".")
    }
    # Also the names: nothing that a kill cut short stays.
    found["names"] = "\n".join(sorted(path.name for path in run.iterdir())).encode()
    for path in sorted(run.glob("[!.]*.keras")):
        for name, array in _weights(path):
            found[f"{path.name}/{name}"] = array.tobytes()
    return found


def _weights(path: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a saved model; a zip file has its date in it."""
    found: dict[str, np.ndarray] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            found[name] = node[()]

    with (
        zipfile.ZipFile(path) as archive,
        archive.open("model.weights.h5") as data,
        h5py.File(data) as file,
    ):
        file.visititems(visit)
    yield from sorted(found.items())


def torture(folder: pathlib.Path, name: str, kills: int, draw: random.Random) -> Tally:
    """Does ``kills`` kills to runs of one configuration."""
    start = time.monotonic()
    whole = folder / f"{name}-whole"
    pace = execute_whole(request(folder, name, whole))
    wanted, tally = results(whole), Tally()
    while tally.kills < kills:
        run = folder / f"{name}-{tally.runs}"
        _complete(request(folder, name, run), kills, tally, pace, draw)
        tally.runs += 1
        tally.different += results(run) != wanted
    tally.seconds = time.monotonic() - start
    return tally


def _complete(
    asked: Request, kills: int, tally: Tally, pace: Pace, draw: random.Random
) -> None:
    """Kills a run, and gives its request again, until it completes."""
    while tally.kills < kills:
        status, steps = execute(asked, draw_moment(draw), pace)
        if status == 0:
            return
        if status != -9:
            raise RuntimeError(f"Expected a run to end; its status is {status}.")
        tally.kills += 1
        tally.kills_after_a_step += steps > 0
    execute_whole(asked)


def main() -> None:
    """Prints a table; ends with status 1 if a run ended in another way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300, help="In all.")
    parser.add_argument("--seed", type=int, default=0, help="Of the moments.")
    parser.add_argument("--only", choices=CONFIGURATIONS, nargs="+")
    flags = parser.parse_args()
    names = flags.only or list(CONFIGURATIONS)
    draw = random.Random(flags.seed)
    print("| configuration | kills | after a step | runs completed | different | s |")
    print("|---|---|---|---|---|---|", flush=True)
    tallies = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        make_inputs(folder)
        for name in names:
            tally = torture(folder, name, -(-flags.kills // len(names)), draw)
            fields = (name, *dataclasses.astuple(tally)[:4], f"{tally.seconds:.0f}")
            print("| " + " | ".join(map(str, fields)) + " |", flush=True)
            tallies.append(tally)
    totals = {
        "kills": sum(tally.kills for tally in tallies),
        "kills_after_a_step": sum(tally.kills_after_a_step for tally in tallies),
        "runs": sum(tally.runs for tally in tallies),
        "different": sum(tally.different for tally in tallies),
    }
    print(json.dumps(totals))
    sys.exit(totals["different"] > 0)


if __name__ == "__main__":
    main()
