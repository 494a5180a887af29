"""One job at a time has a run; of one that was killed the next makes the same files."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.core.files import locks
from tests.trainer.run.whole_runs import LINEAR, child_of, private_settings
from tests.warm_processes import warm_python
from trainer.core.run import run_record
from trainer.core.run.run_record import read_run
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

#: Trains until after step 3, says so, and goes on or dies as it is told.
_WAITS = """
    from trainer.report.progress import Silent
    from trainer.train import train

    class Waits(Silent):
        def advance(self, done):
            if done == 3:
                print("works", flush=True)
                if sys.stdin.readline() == "die\\n":
                    os.kill(os.getpid(), signal.SIGKILL)

    train(request, Waits())
"""


@contextlib.contextmanager
def training(request: Any) -> Iterator[subprocess.Popen[str]]:
    """Yields a process amid the steps of a run."""
    with subprocess.Popen(
        child_of(request, _WAITS, warm_python()),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "works\n"
        yield process


def test_of_two_at_once_the_second_is_refused_and_a_killed_one_is_taken_over(
    request_for: Any,
) -> None:
    """What was refused changed nothing."""
    settings = private_settings(optimizer="sgd", model=LINEAR)
    first, killed = (
        request_for(
            name, settings=settings, checkpoint_every=2, batches_used_before=True
        )
        for name in ("first", "killed")
    )
    with training(first) as process:
        before = sorted(path.name for path in first.run.rglob("*"))
        with pytest.raises(InputError, match="no other job to write") as error:
            train(first)
        assert "\n" not in str(error.value)
        assert sorted(path.name for path in first.run.rglob("*")) == before
        process.communicate("go on\n")
        assert process.returncode == 0
    assert not (first.run / "private" / locks.LOCK_NAME).exists()
    with training(killed) as process:
        process.communicate("die\n")
        assert process.returncode == -signal.SIGKILL
        train(killed)
    assert read_run(killed.run)[0].complete


def test_a_run_that_began_or_ended_since_the_check_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    """Between the check of the folder and its lock another process may have had it."""
    run = tmp_path / "run"

    def open_run(*, resumes: bool) -> None:
        with run_record.open_run(run, resumes=resumes):
            run_record.read_or_create_run_id(run)

    open_run(resumes=False)
    with pytest.raises(InputError, match="no other job"):
        open_run(resumes=False)
    open_run(resumes=True)
    (run / run_record.RECORD_NAME).write_text('{"complete": true}')
    with pytest.raises(InputError, match="no other job"):
        open_run(resumes=True)


ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.thorough
def test_killed_runs_end_with_the_files_of_their_commits() -> None:
    # A process of its own: it must not have used TensorFlow when it forks.
    seed = np.random.default_rng().integers(99)
    kills = ["tests.benchmarks.kills", "--kills=100", f"--seed={seed}"]
    done = subprocess.run(
        [sys.executable, "-m", *kills],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads(done.stdout.splitlines()[-1])
    assert totals["kills"] >= 100
    assert totals["runs"] >= 1
    assert totals["wrong"] == 0
