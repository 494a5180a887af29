"""Kills training runs at random moments, and checks what they end with.

    python -m tests.benchmarks.kills --kills 300

Runs of one request are killed (SIGKILL) and the same request is given again, until a
run completes; then the next one begins, until so many kills were done.  A moment is
drawn at random: a call of a function that commits, publishes, or completes lazy tables;
or any time before the first step; or some steps after the start of this process (up to
``_MOST_STEPS``), and any time within the two steps after, or while results are written.
The public files of a completed run have to be functions of its commits: see ``check``.

A run is a child that is forked from this process, which has imported TensorFlow but
never used it: no context and no thread pool, which is checked before each fork.
So a restart costs no import; what comes after the import is executed, and killed, as in
``dpsgd train``, without the checks of the model, SavedModels and the picture.
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
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its pool would not survive a fork

import h5py
import numpy as np

from pipelines.files import storage
from tests.trainer.conftest import (
    make_rows,
    save_nothing,
    write_batches,
    write_held_out,
)
from tests.trainer.flat_settings import train_settings
from trainer import export, models
from trainer.claims.lazy_noise import LazyNoise
from trainer.core.run.checkpoints import Checkpoints
from trainer.core.run.session import Session
from trainer.report import report
from trainer.report.progress import Silent
from trainer.run.iterates import Iterates
from trainer.run.preflight import Request
from trainer.settings.train_settings import LAZY_NOISE
from trainer.train import train

_FORK = multiprocessing.get_context("fork")
_NUM_STEPS = 120
_EVAL_EVERY = 25
#: Between two looks at the steps of a child.
_LOOK_SECONDS = 0.002
#: Steps that a process may do before it is killed.
_MOST_STEPS = 20
#: Share of the kills that come before the first step, and at a call.
_EARLY, _AT_CALL = 1 / 8, 1 / 2
#: Functions between whose calls a state is committed and published, and of how many
#: calls one kills.  The last two are of lazy tables.
_PLACES: tuple[tuple[Any, str, int], ...] = (
    (Checkpoints, "commit", 10), (storage, "create", 10), (Session, "write_record", 10),
    (Iterates, "keep", 3), (LazyNoise, "flush", 10), (LazyNoise, "_complete", 10),
)  # fmt: skip

#: name -> (settings, rows of a physical batch; None for one batch per step)
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int | None]] = {
    "sgd-lazy": (
        {"optimizer": "sgd", "embedding_noise": "lazy", "learning_rate": 0.5},
        None,
    ),
    "averages": (
        {
            "ema_decay": 0.9,
            "tail": 3,
            "train_over": "ema",
            "optimizer": "adam",
            "learning_rate_schedule": "cosine",
            "warmup_steps": 3,
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
    """What was done, and how many runs ended with wrong files."""

    kills: int = 0
    runs: int = 0
    wrong: int = 0


def make_inputs(folder: pathlib.Path) -> None:
    """Writes batches of both kinds, and held-out examples."""
    steps = [make_rows(4 + seed % 9, seed) for seed in range(_NUM_STEPS)]
    write_batches(folder / "whole", steps)
    write_batches(
        folder / "parts", steps, physical_batch_size=6, truncated_batch_size=None
    )
    write_held_out(folder / "held_out", make_rows(300, seed=99))


def request(folder: pathlib.Path, name: str, run: pathlib.Path) -> Request:
    """Returns the request of a configuration."""
    changes, parts = CONFIGURATIONS[name]
    settings = train_settings(
        embedding_dim=2, hidden=(), noise_multiplier=0.8, l2_norm_clip=1.0,
        target_delta=1e-3, eval_every=_EVAL_EVERY, keep_last=3, **changes,
    )  # fmt: skip
    return Request(
        settings=settings,
        batches=folder / ("whole" if parts is None else "parts"),
        held_out=folder / "held_out",
        run=run,
        checkpoint_every=3,
        batches_used_before=True,  # by the others
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
    """When a process is killed: after so many steps, and a share of what comes.

    Attributes:
      num_steps: Steps of the process.
      share: Share of what comes then.
      spares_results: Whether it is not killed while it writes results.
      place: Index of a function at whose call it is killed instead; None for none.
    """

    num_steps: int
    share: float
    spares_results: bool
    place: int | None = None

    def seconds(self, pace: Pace, steps: _Steps) -> float | None:
        """Returns how long to wait when the steps are done; None to the end."""
        if self.num_steps == 0:
            return self.share * pace.before_steps
        if steps.done.value == _NUM_STEPS:
            return None if self.spares_results else self.share * pace.after_steps
        return self.share * 2 * pace.step


def draw_moment(draw: random.Random, num_places: int) -> Moment:
    """Returns the moment of a kill, by so many of the places."""
    early = draw.random() < _EARLY
    num_steps = 0 if early else draw.randint(1, _MOST_STEPS)
    # Else a busy machine might never write results as fast as they are killed.
    place = draw.randrange(num_places) if draw.random() < _AT_CALL else None
    return Moment(num_steps, draw.random(), draw.random() < 0.5, place)


def execute(asked: Request, moment: Moment, pace: Pace) -> int:
    """Runs a request in a child, until it ends or its moment comes.

    Returns:
      The exit status.
    """
    child, steps = _start(asked, moment)
    if moment.place is None:
        _wait(child, lambda: steps.reached(moment.num_steps))
    child.join(None if moment.place is not None else moment.seconds(pace, steps))
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode is not None  # it was joined
    return child.exitcode


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


def _train(asked: Request, steps: _Steps, moment: Moment | None) -> None:
    """Trains in a child, which is killed at a call and keeps the arrays of commits."""
    Checkpoints._remove = lambda *_: None  # type: ignore[method-assign]
    # Half of a child's time, which no check here reads.
    models.check_model = lambda *_: None
    export._save_tensorflow = save_nothing
    report.plot_curve = lambda *_, title: None
    if moment is not None and moment.place is not None:
        owner, name, most = _PLACES[moment.place]
        original, calls = getattr(owner, name), itertools.count()
        last, after = moment.num_steps % most, moment.share < 0.5

        def die(*arguments: Any, **more: Any) -> Any:
            is_last = next(calls) == last
            if is_last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            found = original(*arguments, **more)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        setattr(owner, name, die)
    train(asked, steps)


def _start(asked: Request, moment: Moment | None = None) -> tuple[Any, _Steps]:
    _check_threads()
    steps = _Steps()
    child = _FORK.Process(target=_train, args=(asked, steps, moment))
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


def check(run: pathlib.Path, settings: Any) -> None:
    """Checks that the public files of a complete run are functions of its commits.

    Args:
      run: Folder of the run, whose commits have all of their arrays.
      settings: Settings of the run.
    """
    folder = run / "private" / "checkpoints"
    commits = [json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))]
    steps = [commit["step"] for commit in commits]
    assert steps == sorted(steps)
    assert steps[-1] == _NUM_STEPS
    record = json.loads((run / "run_record.json").read_bytes())
    assert (record["num_commits"], record["complete"]) == (len(commits), True)
    assert record["num_steps_executed"] == _NUM_STEPS
    weights: dict[int, list[bytes]] = {}
    for commit in commits:
        arrays = np.load(folder / commit["arrays"])
        names = [name for name in arrays if name.startswith("weight_")]
        found = [arrays[name].tobytes() for name in names]
        # A state that is committed again is the same one.
        assert weights.setdefault(commit["step"], found) == found
    kept = sorted((run / "iterates").iterdir())
    wanted = settings.kept_steps(_NUM_STEPS)
    assert [path.name for path in kept] == [f"step-{step:08d}.npz" for step in wanted]
    for step, path in zip(wanted, kept, strict=True):
        assert [a.tobytes() for a in np.load(path).values()] == weights[step]
    exported = [array.tobytes() for _, array in _weights(run / "model.keras")]
    assert sorted(exported) == sorted(weights[_NUM_STEPS])
    points = json.loads((run / "curve.json").read_bytes())["points"]
    evaluated = [*range(0, _NUM_STEPS, _EVAL_EVERY), _NUM_STEPS]
    assert [point["step"] for point in points] == evaluated
    for commit in commits:  # what was published stays
        seen = commit["public"]["points"]
        assert seen == points[: len(seen)]
    metrics = json.loads((run / "metrics.json").read_bytes())
    assert metrics["log_loss"] == points[-1]["log_loss"]
    assert not list(run.rglob(".*"))


def torture(
    folder: pathlib.Path, name: str, kills: int, draw: random.Random, tally: Tally
) -> None:
    """Does ``kills`` kills to runs of one configuration."""
    last = tally.kills + kills
    asked = request(folder, name, folder / f"{name}-whole")
    pace = execute_whole(asked)
    check(asked.run, asked.settings)
    while tally.kills < last:
        asked = request(folder, name, folder / f"{name}-{tally.runs}")
        _complete(asked, last, tally, pace, draw)
        tally.runs += 1
        try:
            check(asked.run, asked.settings)
        except AssertionError:
            traceback.print_exc()
            tally.wrong += 1


def _complete(
    asked: Request, last: int, tally: Tally, pace: Pace, draw: random.Random
) -> None:
    """Kills a run, and gives its request again, until it completes."""
    is_lazy = asked.settings.embedding_noise == LAZY_NOISE
    num_places = len(_PLACES) if is_lazy else len(_PLACES) - 2
    while tally.kills < last:
        status = execute(asked, draw_moment(draw, num_places), pace)
        if status == 0:
            return
        if status != -9:
            raise RuntimeError(f"Expected a run to end; its status is {status}.")
        tally.kills += 1
    execute_whole(asked)


def main() -> None:
    """Prints totals as JSON; ends with status 1 if a run ended with wrong files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300, help="In all.")
    parser.add_argument("--seed", type=int, default=0, help="Of the moments.")
    parser.add_argument("--only", choices=CONFIGURATIONS, nargs="+")
    flags = parser.parse_args()
    names = flags.only or list(CONFIGURATIONS)
    draw = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        make_inputs(folder)
        tally = Tally()
        for name in names:
            torture(folder, name, -(-flags.kills // len(names)), draw, tally)
    print(json.dumps(dataclasses.asdict(tally)))
    sys.exit(tally.wrong > 0)


if __name__ == "__main__":
    main()
