"""Settings, keys and results of small whole runs, for the tests beside this file."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from pipelines.batches.folder import stored
from tests.trainer.bounded import StandIn
from tests.trainer.conftest import BatchFolder, make_rows
from tests.trainer.flat_settings import train_settings
from trainer.core.run.checkpoints import Checkpoints, State
from trainer.core.run.run_record import read_run
from trainer.core.run.session import Session
from trainer.core.step.workers import Alone, Workers
from trainer.core.tf_compat import keras
from trainer.keras_model import make_private
from trainer.model.metrics import binary_metrics
from trainer.report.progress import Silent
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings

SMALL: dict[str, Any] = {"embedding_dim": 2, "hidden": (4,)}
#: Secret of all attempts, of a test that compares runs.
ONE_SECRET = b"5" * 32
ROOT = pathlib.Path(__file__).parents[3]
#: All averages; of ten steps 6, 8 and 10 are kept.
AVERAGES: dict[str, Any] = {
    "ema_decay": 0.9,
    "tail": 3,
    "keep_last": 3,
    "keep_every": 2,
    "export": ("upa",),
}


class Planted(KeyboardInterrupt):
    """A kill, as far as a run in the same process can tell."""


class KillAt(Silent):
    """Ends the run after a step like a kill."""

    def __init__(self, step: int) -> None:
        self._step = step

    def advance(self, done: int) -> None:
        if done == self._step:
            raise Planted


class Said(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def child_of(
    request: Request, code: str, python: str | os.PathLike[str] = sys.executable
) -> list[str]:
    """Returns the command of a process that does ``code`` with a ``request``."""
    path = request.run.with_name(f"{request.run.name}.pickle")
    path.write_bytes(pickle.dumps(request))
    head = (
        "import os, pathlib, pickle, signal, sys\n"
        f"sys.path.insert(0, {os.fspath(ROOT)!r})\n"
        f"request = pickle.loads(pathlib.Path({os.fspath(path)!r}).read_bytes())\n"
    )
    return [os.fspath(python), "-c", head + textwrap.dedent(code)]


#: The name of ``linear``, with which a run takes two thirds of the time.
LINEAR = "tests.trainer.run.whole_runs:linear"


def linear(manifest: Any = None) -> Any:
    """A network of 14 weights."""
    inputs = keras.Input((13,), name="integers")
    known = keras.ops.nan_to_num(inputs) / 8
    return keras.Model(inputs, keras.layers.Dense(1)(known))


def private_model(
    batches: Any, run: pathlib.Path, network: Any = None, **more: Any
) -> Any:
    """A compiled model of ``make_private``."""
    given = {"noise_multiplier": 0.8, "l2_norm_clip": 1.0, "delta": 1e-3, **more}
    model = make_private(network or linear(), batches=batches.path, run=run, **given)
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def private_settings(**changes: Any) -> TrainSettings:
    fields = {"noise_multiplier": 0.8, "l2_norm_clip": 1.0, "target_delta": 1e-3}
    return train_settings(**{**SMALL, **fields, **changes})


def open_session(
    step: StandIn,
    batches: BatchFolder,
    run: pathlib.Path,
    settings: TrainSettings,
    *,
    num_steps_executed: int = 0,
    workers: Workers | None = None,
) -> Session:
    """Returns a session with a folder, which uses ``step``."""
    assert settings.noise_multiplier is not None
    session = Session(
        settings=settings,
        manifest=batches.manifest,
        noise_multiplier=settings.noise_multiplier,
        batches=stored(batches.path),
        run=run,
        take_batches=lambda run_id: None,
        batches_used_before=False,
        num_steps_executed=num_steps_executed,
        workers=workers or Alone(),
    )
    with contextlib.ExitStack() as held:
        session.open(held, resumes=run.exists())
    session.use(
        step.of(batches.manifest.plan),
        optimizer=settings.describe_optimizer(),
        model={"name": "model"},
    )
    return session


def load_model(path: pathlib.Path) -> Any:
    return keras.models.load_model(path)


def weights_of(run: pathlib.Path) -> list[np.ndarray]:
    """Returns the weights of all models of the run."""
    models = map(load_model, sorted(run.glob("*.keras")))
    return [v.numpy() for model in models for v in model.weights]


def same_results(
    left: pathlib.Path, right: pathlib.Path, *, claims: bool = True
) -> bool:
    """Returns whether two finished runs have bit-identical results.

    Args:
      left: Folder of a run.
      right: Folder of another run.
      claims: Whether they rely on the same claims, which their statements name.
    """
    pairs = zip(weights_of(left), weights_of(right), strict=True)
    patterns = ["metrics.json", "curve.json", "*.parquet", "iterates/*"]
    patterns += ["privacy.*"] * claims
    names = [
        [str(path.relative_to(run)) for name in patterns for path in run.glob(name)]
        for run in (left, right)
    ]
    return (
        all(a.tobytes() == b.tobytes() for a, b in pairs)
        and sorted(names[0]) == sorted(names[1])
        and all((left / n).read_bytes() == (right / n).read_bytes() for n in names[0])
    )


#: Settings of a run of ten steps that publishes after 4, 6, 8 and 10 of them.
PUBLISHING: dict[str, Any] = {
    "optimizer": "sgd", "model": LINEAR, "eval_every": 4, "keep_last": 3,
    "keep_every": 2,
}  # fmt: skip


class Chain:
    """The commits of a run, in all of its attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[State] = []
        commit = Checkpoints.commit

        def keep(checkpoints: Checkpoints, state: State) -> None:
            entry = f"{checkpoints.number + 1:08d}.json"
            try:
                commit(checkpoints, state)
            except KeyboardInterrupt:  # a kill, perhaps after the commit
                if entry in checkpoints._files.names(checkpoints._folder):
                    self.states.append(state)
                raise
            self.states.append(state)

        monkeypatch.setattr(Checkpoints, "commit", keep)

    @property
    def step(self) -> int:
        return self.states[-1].step if self.states else -1

    def weights(self, step: int) -> list[np.ndarray]:
        """Weights after a step, of which there is one version."""
        [first, *others] = (s.arrays for s in self.states if s.step == step)
        names = [n for n in first if n.startswith("weight_")]
        for other in others:
            assert all(np.array_equal(first[n], other[n]) for n in names)
        return [first[name] for name in names]


def check_complete(run: pathlib.Path, chain: Chain) -> None:
    """Checks that all public files are functions of the committed states."""
    steps = [state.step for state in chain.states]
    assert steps == sorted(steps)
    record, _ = read_run(run)
    assert (record.num_steps_executed, record.complete) == (10, True)
    assert record.num_commits == len(chain.states)
    kept = sorted((run / "iterates").iterdir())
    assert [path.name for path in kept] == [f"step-{n:08d}.npz" for n in (6, 8, 10)]
    for step, path in zip((6, 8, 10), kept, strict=True):
        for name, array in zip(
            np.load(path).values(), chain.weights(step), strict=True
        ):
            np.testing.assert_array_equal(name, array)
    for found, array in zip(
        load_model(run / "model.keras").get_weights(), chain.weights(10), strict=True
    ):
        np.testing.assert_array_equal(found, array)
    points = json.loads((run / "curve.json").read_text())["points"]
    assert [point["step"] for point in points] == [0, 4, 8, 10]
    rows = make_rows(300, seed=99)
    for point in points:
        kernel, bias = chain.weights(point["step"])
        logits = np.nan_to_num(rows["integers"]) / 8 @ kernel[:, 0] + bias
        wanted = binary_metrics(rows["label"], logits)["log_loss"]
        assert point["log_loss"] == pytest.approx(wanted, rel=1e-5)
