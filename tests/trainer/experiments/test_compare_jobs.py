"""Concurrent runs: how many, in how much memory, and what ends them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.validation import InputError
from trainer.experiments import compare as library
from trainer.experiments.comparison import jobs as compare_jobs
from trainer.experiments.comparison import runs as compare_runs
from trainer.experiments.comparison.jobs import (
    check_jobs,
    train_and_measure,
    train_at_once,
)
from trainer.experiments.comparison.runs import silent
from trainer.run.preflight import Request
from trainer.settings import methods
from trainer.settings.comparison_settings import ComparisonSettings
from trainer.settings.train_settings import TrainSettings

ROOT = pathlib.Path(__file__).parents[3]
HELPER = """
import os, pathlib, signal, time
from pipelines.files.stopping import StoppedError

def train(module, request):
    run = request.run
    if run.name == "first":
        return 1
    if run.name == "killed":
        while not (run.parent / "waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        run.touch()
        time.sleep(600)
    except StoppedError:
        run.with_name("stopped").touch()
        raise
"""


def _requests(folder: pathlib.Path, *names: str) -> list[Request]:
    return [
        Request(
            settings=TrainSettings(method="non-private"),
            batches=folder,
            held_out=folder,
            run=folder / name,
        )
        for name in names
    ]


class Started:
    """A process that has ended: the first took 4 bytes, others 5; counts the alive."""

    alive = 0
    most: list[int]

    def __init__(self, function: str, module: str, request: Request) -> None:
        del function, module, request
        self._end, other = os.pipe()
        os.close(other)
        Started.alive += 1
        Started.most.append(Started.alive)

    def fileno(self) -> int:
        return self._end

    def result(self) -> int:
        os.close(self._end)
        Started.alive -= 1
        return 4 if len(Started.most) == 1 else 5


@pytest.mark.parametrize(
    ("jobs", "memory_limit", "at_once"), [(3, 100, 3), (3, 11, 2), (3, 3, 1), (1, 9, 1)]
)
def test_no_more_runs_at_once_than_jobs_and_memory_allow(
    jobs: int,
    memory_limit: int,
    at_once: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_jobs, "Process", Started)
    monkeypatch.setattr(Started, "most", [], raising=False)
    said: list[str] = []
    train_at_once(
        _requests(tmp_path, *"abcdefg"),
        jobs=jobs, memory_limit=memory_limit, say=said.append,
    )  # fmt: skip
    assert len(Started.most) == 7
    assert Started.most[:2] == [1, 1]  # the first is alone
    assert max(Started.most) == at_once
    notes = [line for line in said if "at once fit into memory_limit" in line]
    assert len(notes) == (at_once < jobs)  # once, though later runs take more


def test_a_run_that_is_killed_stops_the_others_and_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_of_jobs.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(InputError, match=r"status .* is -9.*/killed; the same command"):
        train_at_once(
            _requests(tmp_path, "first", "killed", "waits"),
            jobs=2, memory_limit=100, say=silent, train="helper_of_jobs:train",
        )  # fmt: skip
    assert (tmp_path / "stopped").exists()


def test_a_run_of_its_own_process_is_the_run_of_this_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []
    monkeypatch.setattr(compare_runs, "train_here", trained.append)
    [request] = _requests(tmp_path, "a")
    assert train_and_measure("math", request) > 1 << 20  # bytes
    assert trained == [request]


OUTSIDE = """
from trainer.settings import methods

methods.register("outside", methods.Method(
    summary="", hooks=lambda: None, whole_tables=lambda settings: None,
))
"""


def test_a_method_from_outside_is_known_where_it_trains(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    make_settings: Callable[..., ComparisonSettings],
) -> None:
    monkeypatch.setattr(methods, "_ENTRIES", dict(methods._ENTRIES))
    (tmp_path / "outside_method.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    assert "outside" not in methods.names()
    trained: list[Any] = []
    monkeypatch.setattr(compare_runs, "train_here", trained.append)
    [request] = _requests(tmp_path, "a")
    train_and_measure("outside_method", request)
    assert "outside" in methods.names()
    settings = make_settings(
        jobs=2,
        trained=(TrainSettings(method="outside", noise_multiplier=1, l2_norm_clip=1),),
    )
    check_jobs(settings)
    # What a script registers, it alone knows.
    monkeypatch.setattr(methods.get("outside").hooks, "__module__", "__main__")
    with pytest.raises(InputError, match="jobs=2 to be 1 for method='outside'"):
        library.compare(settings)
