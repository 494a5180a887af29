"""Workers as processes that ``mpiexec`` started."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("mpi4py", reason="no MPI: pip install mpi4py mpich")
ROOT = pathlib.Path(__file__).parents[4]
MPIEXEC = shutil.which("mpiexec", path=pathlib.Path(sys.executable).parent)
PROGRAM = str(pathlib.Path(__file__).parent / "program.py")

pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install mpich")


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


@pytest.mark.thorough
def test_workers_of_one_host_listen_on_loopback_alone() -> None:
    assert run("listen") == (0, "127.0.0.1\n", [])


def test_an_error_that_all_know_of_is_said_once() -> None:
    status, _, [error] = run("refuse")
    assert status == 2
    assert error.startswith("error: worker 1 on ")
    assert error.endswith(": Expected a file.")


def test_a_signal_that_comes_late_changes_no_agreed_stop() -> None:
    """Seen to fail: the worker was killed by it, and the status was 15."""
    assert run("signal_late") == (128 + signal.SIGTERM, "", [])


def test_a_worker_that_hangs_is_named_and_ends_all() -> None:
    status, _, [error] = run("hang", count=3)
    assert status
    assert "Expected all 3 workers within 1 seconds; worker 2 on " in error


def test_a_worker_that_is_done_waits_for_the_chief_without_a_limit() -> None:
    assert run("finish") == (0, "finished\n", [])


@pytest.mark.thorough
def test_an_error_of_one_worker_ends_all() -> None:
    assert run("fail")[::2] == (2, ["error: Expected a batch."])


@pytest.mark.thorough
def test_a_worker_that_is_killed_ends_all() -> None:
    status, _, errors = run("killed")
    assert status
    assert not errors


@pytest.mark.thorough
def test_a_worker_that_never_starts_is_an_error_of_those_that_did() -> None:
    status, _, [error] = run("late", timeout=5)
    assert status
    assert "Expected all 2 workers to start within 5 seconds" in error
