"""A killed run ends with the bits of one that was not killed, or is refused."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.files.key_files import create_key_file
from pipelines.files.storage import write_atomically
from tests.trainer.conftest import write_held_out
from tests.trainer.run.whole_runs import (
    AVERAGES,
    LINEAR,
    ONE_ID,
    Planted,
    child_of,
    private_settings,
    same_results,
)
from tests.warm_processes import warm_python
from trainer.averaging.iterates import Iterates
from trainer.core.run import authenticated_arrays
from trainer.core.run.checkpoints import CHECKPOINT_NAME, Checkpoints, State
from trainer.core.run.session import Session
from trainer.report.progress import Silent
from trainer.run.preflight import Request
from trainer.train import StoppedError, train

pytestmark = pytest.mark.usefixtures("lean_results")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": "sgd"}, marks=pytest.mark.thorough),
        {
            "optimizer": "adam",
            "learning_rate_schedule": "cosine",
            "warmup_steps": 2,
            "l2_norm_clip": None,
        },
        pytest.param(
            {"method": "dp-sat", "sat_radius": 0.1}, marks=pytest.mark.thorough
        ),
        pytest.param(
            {"method": "bam", "bam_radius": 0.1, "optimizer": "sgd"},
            marks=pytest.mark.thorough,
        ),
        {
            "method": "model-mix",
            "mix_width": 0.1,
            "linf_factor": 4,
            "optimizer": "sgd",
            "learning_rate_schedule": "linear",
            "model": LINEAR,
            "train_over": None,
            "aggregate_from": None,
        },
    ],
)
def test_a_crashed_run_continues_to_bit_identical_results(
    changes: dict[str, Any], request_for: Any, tmp_path: pathlib.Path, crash: Any
) -> None:
    feedback = {"train_over": "uta", "aggregate_from": 4}
    settings = private_settings(**{**AVERAGES, **feedback, **changes})
    train(request_for("whole", run_id=ONE_ID, settings=settings))
    request = request_for(
        "broken", run_id=ONE_ID, settings=settings, checkpoint_every=3
    )
    crash(request, 8)
    train(request)
    assert same_results(tmp_path / "whole", tmp_path / "broken")


# -- crashes and stops -----------------------------------------------------------------


def _stop(request: Request) -> None:
    """Sends a signal after step 3, at which the run ends after the next step."""

    class StopAtThree(Silent):
        def advance(self, done: int) -> None:
            if done == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    # Between two steps: workers agree on it in the next one.
    with pytest.raises(StoppedError, match="step 4 of 10"):
        train(request, StopAtThree())
    assert signal.getsignal(signal.SIGTERM) == before


def _half_a_checkpoint(path: pathlib.Path, data: bytes, **more: Any) -> None:
    """Stands in for ``write_atomically``, and dies while it writes a checkpoint."""
    if path.name == CHECKPOINT_NAME:
        path.with_name(f".{CHECKPOINT_NAME}.half").write_bytes(data[: len(data) // 2])
        raise Planted
    write_atomically(path, data, **more)


def _after_keep(self: Iterates, step: int, weights: Any) -> None:
    _KEEP(self, step, weights)
    if step == 8:
        raise Planted


def _before_record(*_: object, complete: bool) -> None:
    if complete:  # the record of the first step is not
        raise Planted


_KEEP = Iterates.keep
#: Where a run dies, in the order in which it comes there, and by what.
_CRASHES: list[tuple[Any, str, Any]] = [
    (authenticated_arrays, "write_atomically", _half_a_checkpoint),
    (Iterates, "keep", _after_keep),
    (Session, "write_record", _before_record),
]


def test_a_run_that_is_stopped_and_crashes_wherever_it_writes_ends_bit_identical(
    request_for: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written checkpoint leaves the one before; so with iterates and results.

    What a kill cut short is removed when the run goes on.
    """
    settings = private_settings(
        optimizer="sgd", keep_last=3, keep_every=2, model=LINEAR
    )
    train(request_for("whole", run_id=ONE_ID, settings=settings))
    request = request_for(
        "broken", run_id=ONE_ID, settings=settings, checkpoint_every=5
    )
    _stop(request)
    for target, name, crash in _CRASHES:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, crash)
            with pytest.raises(Planted):
                train(request)
    (request.run / ".0a.saved_model").mkdir()
    for name in (".0a.saved_model/part", ".0b.model.keras", "private/.0c.run.id"):
        (request.run / name).write_bytes(b"half")
    train(request)
    assert not list(request.run.rglob(".*"))
    assert same_results(tmp_path / "whole", tmp_path / "broken")


def test_a_damaged_checkpoint_is_refused(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(run=tmp_path, run_key=bytes(32))
    (tmp_path / "private").mkdir()
    state = State(
        num_steps_executed=4, arrays=(np.arange(9.0),), points=(), held_out="",
        relies_on=(),
    )  # fmt: skip
    checkpoints.save(state)
    whole = checkpoints.read()
    flipped = [bytearray(whole) for _ in range(3)]
    for data, place in zip(flipped, (0, 40, -1), strict=True):
        data[place] ^= 1
    for damaged in (*map(bytes, flipped), whole[:100]):
        with pytest.raises(InputError, match="damaged"):
            checkpoints.parse(damaged)
    assert checkpoints.load() is not None


#: The file with another last byte.
FLIPPED = b"flipped"


def test_a_run_with_a_damaged_file_does_not_go_on(
    request_for: Any, crash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = private_settings(
        optimizer="sgd", keep_last=3, keep_every=2, model=LINEAR
    )
    request = request_for(settings=settings, checkpoint_every=1)
    crash(request, 7)
    steps: list[int] = []
    reporter = Silent()
    monkeypatch.setattr(reporter, "advance", steps.append)
    for name, damaged, message in (
        ("iterates/step-00000006.npz", FLIPPED, r"step-00000006\.npz.*was changed"),
        (f"private/{CHECKPOINT_NAME}", FLIPPED, "damaged"),
        ("private/run.id", b"0" * 32, r"run\.id"),
        ("private/run.id", None, "checkpoint of this run"),
    ):
        path = request.run / name
        before = path.read_bytes()
        flipped = before[:-1] + bytes([before[-1] ^ 1])
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(flipped if damaged is FLIPPED else damaged)
        with pytest.raises(InputError, match=message):
            train(request, reporter)
        path.write_bytes(before)
    assert not steps


def test_a_run_does_not_continue_as_another_one(
    request_for: Any,
    crash: Any,
    tmp_path: pathlib.Path,
    small_batches: Any,
    batch_folder: Callable[..., Any],
    rows: Any,
    held_out: Any,
) -> None:
    crash(request_for(checkpoint_every=2), 5)
    other_plan = batch_folder(small_batches.steps, "plan", num_examples=201)
    other_rows = [*small_batches.steps[:-1], small_batches.steps[0]]
    other_data = batch_folder(other_rows, "data")
    create_key_file(tmp_path / "other.key")
    other = write_held_out(tmp_path / "other", rows(300, seed=98))
    settings: dict[str, dict[str, Any]] = {
        r"noise_multiplier=0\.9.*0\.8": {"noise_multiplier": 0.9},
        r"hidden=\[5\] to be \[4\]": {"hidden": (5,)},
        "optimizer='sgd' to be 'adam'": {"optimizer": "sgd"},
    }
    for changes, message in (
        *(({"settings": private_settings(**s)}, m) for m, s in settings.items()),
        ({"batches": other_plan.path}, "these are others"),
        ({"batches": other_data.path}, "these are others"),
        ({"noise_key_file": tmp_path / "other.key"}, "another key"),
        ({"held_out": other}, r"--eval .*first 4 steps"),
    ):
        with pytest.raises(InputError, match=message):
            train(request_for(**{"checkpoint_every": 2, **changes}))
    # The same examples elsewhere are the same.
    shutil.copytree(held_out, tmp_path / "moved")
    train(request_for(held_out=tmp_path / "moved", checkpoint_every=2))


_KILLED = """
    from trainer.report.progress import Silent
    from trainer.train import train

    class KillAt(Silent):
        def advance(self, done):
            if done == {step}:
                os.kill(os.getpid(), signal.SIGKILL)

    train(request, KillAt())
"""


@pytest.mark.thorough
def test_a_run_killed_twice_ends_bit_identical(
    request_for: Any, tmp_path: pathlib.Path
) -> None:
    settings = private_settings(**AVERAGES, train_over="ema")
    train(request_for("whole", run_id=ONE_ID, settings=settings))
    killed = request_for("killed", run_id=ONE_ID, settings=settings, checkpoint_every=3)
    for step, code in ((1, -signal.SIGKILL), (8, -signal.SIGKILL), (99, 0)):
        done = subprocess.run(
            child_of(killed, _KILLED.format(step=step), warm_python()),
            capture_output=True, check=False, text=True,
        )  # fmt: skip
        assert done.returncode == code
        # The terminal is for progress: TensorFlow writes nothing to it.
        assert done.stdout + done.stderr == ""
    assert same_results(tmp_path / "whole", tmp_path / "killed")
