"""The workers that a process finds when it is launched."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from accounting.core.validation import InputError
from trainer.claims.workers import launch
from trainer.claims.workers.launch import announced, of_this_process
from trainer.core.step.workers import Alone


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1)),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, (0, 1)),
        ({"PMI_SIZE": "3", "PMI_RANK": "2"}, (2, 3)),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, (0, 1)),
        ({"SLURM_STEP_NUM_TASKS": "1"}, (0, 1)),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "3", "PMI_RANK": "2"}, (2, 3)),
    ],
)
def test_launchers_say_how_many_they_started(
    variables: dict[str, str], place: tuple[int, int]
) -> None:
    assert announced(variables) == place


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    of_this_process.cache_clear()


def test_another_mpi_is_refused() -> None:
    with pytest.raises(InputError, match="pip install mpich"):
        announced({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"})


def test_a_launcher_that_does_not_say_how_many_it_started_is_refused() -> None:
    """Seen to fail: each process of `mpiexec -pmi-port -n 2` trained alone."""
    with pytest.raises(InputError, match="without -pmi-port"):
        announced({"PMI_PORT": "host:33673", "PMI_ID": "1"})
    with pytest.raises(InputError, match=r"SLURM_STEP_NUM_TASKS says 4, .* mpiexec"):
        announced({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"})


def test_mpi_keeps_to_the_device_that_was_named() -> None:
    named = {"UCX_NET_DEVICES": "eth0", "MPI_LOCALNRANKS": "1"}
    launch._keep_to_device(named, 2)
    assert named["UCX_NET_DEVICES"] == "eth0"
    on_one_host = {"MPI_LOCALNRANKS": "2"}
    launch._keep_to_device(on_one_host, 2)
    assert on_one_host["UCX_NET_DEVICES"] == "lo"
    with pytest.raises(InputError, match="-genv UCX_NET_DEVICES eth0"):
        launch._keep_to_device({"MPI_LOCALNRANKS": "1"}, 2)


def test_a_process_alone_loads_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert type(of_this_process()) is Alone


def test_workers_without_mpi_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "trainer.claims.workers.mpi", raising=False)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("UCX_NET_DEVICES", "")  # the launch sets it
    with pytest.raises(InputError, match="pip install mpi4py mpich"):
        of_this_process()
    monkeypatch.setenv("PMI_RANK", "1")  # rank 0 reported it
    with pytest.raises(SystemExit):
        of_this_process()


#: Prints the bytes that the system gets back when vectors of 16 MiB are freed.
_FREED = """
import os, pathlib
import numpy as np
from trainer.claims.workers import launch
from trainer.core.step.workers import Alone

def resident():
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")

launch._load_mpi = lambda count: lambda **_: Alone()
launch.of_this_process()
vectors = [np.ones(1 << 21, np.int64) for _ in range(8)]
held = resident()
del vectors
print(held - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_workers_keep_the_memory_of_vectors_that_are_freed() -> None:
    of_launcher = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _FREED],
        env={**os.environ, **of_launcher},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 1 << 24, "less than one vector"


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(InputError, match="worker_timeout"):
        of_this_process(timeout)


def test_mpi_is_imported_by_the_launch_alone() -> None:
    code = "import sys, trainer.cli.commands; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
