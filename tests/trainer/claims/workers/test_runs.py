"""Runs by several workers, which ``mpiexec`` started, and what ends them."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.engines.harness.polling import wait_for
from tests.trainer.conftest import make_rows
from tests.trainer.run.whole_runs import ONE_SECRET, same_results
from tests.warm_processes import warm_python
from trainer.cli.train_command import train_request
from trainer.core.run import session
from trainer.core.run.run_record import read_run
from trainer.train import train

pytest.importorskip("mpi4py", reason="no MPI: pip install mpi4py mpich")
ROOT = pathlib.Path(__file__).parents[4]
MPIEXEC = shutil.which("mpiexec", path=pathlib.Path(sys.executable).parent)
pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install mpich")

SETTINGS = [
    "--noise-multiplier=0.8", "--delta=1e-3", "--l2-norm-clip=1", "--embedding-dim=2",
    "--hidden=4", "--worker-timeout=120", "--batches-used-before",
]  # fmt: skip
#: A metric that tells of an evaluation, the first of which is before the first step.
TOLD = """
import pathlib

def mean(labels, predictions):
    pathlib.Path("evaluated").touch()
    return float(predictions.mean())
"""


@pytest.fixture(autouse=True)
def of_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs in this process, as of those that ``start`` starts."""
    monkeypatch.setattr(session, "new_secret", lambda: ONE_SECRET)


@pytest.fixture
def arguments(batch_folder: Any, held_out: Any, tmp_path: pathlib.Path) -> Any:
    """``arguments(run, batches)`` of `dpsgd train`: steps of three parts, one empty."""
    sizes = [40, 9, 0, 48, 17, 33, 48, 2]
    folder = batch_folder(
        [make_rows(size, seed) for seed, size in enumerate(sizes)],
        expected_batch_size=24,
        truncated_batch_size=48,
    )

    def make(run: str, batches: Any = folder.path) -> list[str]:
        return [
            f"--batches={batches}", f"--eval={held_out}", *SETTINGS,
            f"--out={tmp_path / run}",
        ]  # fmt: skip

    return make


#: ``dpsgd`` with a secret of its chief that the test knows.
DPSGD = f"""
from dpsgd.__main__ import main
from trainer.core.run import session

session.new_secret = lambda: {ONE_SECRET}
main()
"""


def start(arguments: list[str], count: int) -> subprocess.Popen[str]:
    """Starts workers."""
    assert MPIEXEC is not None
    command = [warm_python(), "-c", DPSGD, "train", *arguments]
    return subprocess.Popen(
        [MPIEXEC, "-n", str(count), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(job: subprocess.Popen[str], status: int = 0) -> str:
    """Returns the standard error of a job that ends with the expected status."""
    _, errors = job.communicate(timeout=600)
    assert job.returncode == status, errors
    return errors


@pytest.mark.thorough
def test_three_workers_stop_together_and_go_on_as_two(
    arguments: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told.py").write_text(TOLD)
    told, metric = tmp_path / "evaluated", ["--eval-every=1", "--metric=told:mean"]
    train(train_request([*arguments("one"), *metric]))
    told.unlink()
    given = [*arguments("several"), *metric]
    job = start(given, 3)
    wait_for("a step", lambda: told.exists() or job.poll() is not None, 300)
    job.send_signal(signal.SIGTERM)
    errors = finish(job, 128 + signal.SIGTERM)
    assert errors.count("error: ") == 1
    assert "error: Stopped after step" in errors
    errors = finish(start(given, 2))
    assert "continuing after step" in errors
    assert "workers" in read_run(tmp_path / "several")[0].relies_on
    assert same_results(tmp_path / "one", tmp_path / "several", claims=False)


PROGRAM = str(pathlib.Path(__file__).parent / "program.py")


def run(name: str, *, count: int = 2, timeout: int = 60) -> tuple[int, str, list[str]]:
    """Exit status, output and lines of error of a function of ``program``."""
    assert MPIEXEC is not None
    done = subprocess.run(
        [MPIEXEC, "-n", str(count), sys.executable, PROGRAM, name, str(timeout)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return done.returncode, done.stdout, errors


def test_sums_are_exact_and_values_come_by_rank() -> None:
    assert run("exchange", count=3) == (0, "exchanged\n", [])


def test_an_error_that_all_know_of_is_said_once() -> None:
    status, _, [error] = run("refuse")
    assert status == 2
    assert error.startswith("error: worker 1 on ")
    assert error.endswith(": Expected a file.")


def test_a_signal_that_comes_late_changes_no_agreed_stop() -> None:
    """Seen to fail: the worker was killed by it, and the status was 15."""
    assert run("signal_late") == (128 + signal.SIGTERM, "", [])


def test_a_worker_that_hangs_ends_all() -> None:
    status, _, [error] = run("hang", count=3)
    assert status
    assert "Expected all 3 workers within 1 seconds, on " in error


def test_a_worker_that_is_done_waits_for_the_chief_without_a_limit() -> None:
    assert run("finish") == (0, "finished\n", [])


@pytest.mark.thorough
def test_a_worker_that_is_killed_ends_all() -> None:
    status, _, errors = run("killed")
    assert status
    assert not errors
