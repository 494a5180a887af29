"""The workers that a process finds when it is launched."""

from __future__ import annotations

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
