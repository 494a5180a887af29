"""What workers agree on, and how a process finds them."""

from __future__ import annotations

import itertools
import signal
import sys
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.thread_workers import outcomes
from trainer.claims import launch, worker_group
from trainer.claims.launch import announced, of_this_process
from trainer.claims.worker_group import AgreedError
from trainer.core.step.workers import Alone, TakenStep


def refused(found: list[Any]) -> str:
    """Returns the chief's message; the others exit silently."""
    chief, *others = found
    assert type(chief) is AgreedError
    assert "\n" not in str(chief)
    assert all(type(other) is SystemExit and other.code == 2 for other in others)
    return str(chief)


def test_what_fails_at_one_worker_ends_all_and_is_said_once() -> None:
    def work(workers: Any) -> str:
        def own() -> str:
            if workers.rank == 1:
                raise InputError("Expected a file.")
            return f"done {workers.rank}"

        return workers.together(own)

    message = refused(outcomes(3, work))
    assert message.startswith("worker 1 on ")
    assert message.endswith(": Expected a file.")


VALUES = {"settings": {"rate": 0.1}, "batches": "5f" * 32, "versions": {"numpy": "2"}}
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"settings": {"rate": 0.2}}, "settings rate"),
    ({"settings": {"rate": 0.1, "more": 1}}, "settings more"),
    ({"batches": "60" * 32}, "batches"),
    ({"versions": {"numpy": "3"}}, "versions numpy"),
]


@pytest.mark.parametrize(("change", "name"), OTHERS)
@pytest.mark.parametrize("who", [0, 2])
def test_a_worker_with_another_value_is_refused_by_name(
    change: dict[str, Any], name: str, who: int
) -> None:
    def work(workers: Any) -> None:
        values = {**VALUES, **change} if workers.rank == who else VALUES
        workers.compare(values)

    message = refused(outcomes(3, work))
    assert f"the same {name} at all workers" in message
    # Values are compared with the chief's: if it is the odd one, all others differ.
    assert "worker 2 on " in message
    assert ("worker 1 on " in message) == (who == 0)


def test_a_worker_with_other_weights_is_named() -> None:
    def work(workers: Any) -> None:
        weights = [np.zeros(3, np.float32), np.float32(0)]
        if workers.rank == 2:
            weights[0][1] = np.nextafter(np.float32(0), np.float32(1))
        worker_group.same_arrays(workers, weights, 7)

    message = refused(outcomes(3, work))
    assert "after step 7; those of worker 2 on " in message
    assert (
        outcomes(2, lambda w: worker_group.same_arrays(w, [np.ones(2)], 1))
        == [None] * 2
    )


def settle(shares: list[list[int]], parts_per_step: int | None, **more: Any) -> Any:
    nothing = [None] * len(shares)
    signals, failures = more.get("signals", nothing), more.get("failures", nothing)
    return outcomes(
        len(shares),
        lambda w: w.settle_step(
            TakenStep(
                step=4,
                parts=shares[w.rank],
                parts_per_step=parts_per_step,
                signal_number=signals[w.rank],
                failure=failures[w.rank],
            )
        ),
    )


@pytest.mark.parametrize("wanted", [3, None])
def test_a_step_is_settled_whoever_has_its_parts(wanted: int | None) -> None:
    for split in itertools.product(range(2), repeat=3):
        shares = [[p for p in range(3) if split[p] == rank] for rank in range(2)]
        assert settle(shares, wanted) == [None, None]


@pytest.mark.parametrize(
    ("shares", "parts_per_step"),
    [
        ([[0], []], 2),  # a part is nobody's
        ([[0, 2], [1]], 2),  # one too many
        ([[], []], None),  # no part at all
        ([[0, 2], []], None),  # none of the middle
        ([[0, 1], [1]], None),  # one is two workers'
        ([[0, 1, 5], [0, 2]], 5),  # the same number, and the same sum of squares
        ([[0, 3, 5, 6], [0, 3, 5, 6]], 8),  # the same number, sum and sum of squares
    ],
)
def test_a_step_without_each_part_once_is_refused(
    shares: list[list[int]], parts_per_step: int | None
) -> None:
    assert "each part of step 4 once" in refused(settle(shares, parts_per_step))


def test_an_error_of_one_worker_within_a_step_is_raised_at_all() -> None:
    """Seen to fail: the others waited for the gradients of the one that had ended."""
    failures = [None, InputError("Expected ids within the table."), None]
    message = refused(settle([[0], [], [1]], 2, failures=failures))
    assert message.startswith("worker 1 on ")
    assert message.endswith(": Expected ids within the table.")


def test_a_signal_that_one_worker_received_is_the_answer_at_all() -> None:
    for signals in ([None, signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]):
        assert settle([[0], [1]], 2, signals=signals) == [signal.SIGTERM] * 2
    assert settle([[0], [1]], 2, signals=[signal.SIGINT, None]) == [signal.SIGINT] * 2


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


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        {"PMI_PORT": "host:33673", "PMI_ID": "1"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"},
    ],
)
def test_a_launcher_that_does_not_say_how_many_it_started_is_refused(
    variables: dict[str, str],
) -> None:
    """Seen to fail: each process of `mpiexec -pmi-port -n 2` trained alone."""
    with pytest.raises(InputError, match=f"{next(iter(variables))} says that another"):
        announced(variables)


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
    monkeypatch.delitem(sys.modules, "trainer.claims.mpi", raising=False)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("UCX_NET_DEVICES", "")  # the launch sets it
    with pytest.raises(InputError, match="pip install mpi4py mpich"):
        of_this_process()
    monkeypatch.setenv("PMI_RANK", "1")  # rank 0 reported it
    with pytest.raises(SystemExit):
        of_this_process()
