"""Guarantees of pipelines on an engine: how failures and signals end them."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import threading
from collections.abc import Callable

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineRunner

from accounting.core.validation import InputError
from pipelines.files.processes import StoppedError, stoppable
from pipelines.job import engine_tasks
from pipelines.job.runtime import StorageError
from tests.pipelines.conftest import Command, write_table


class LostRunner(PipelineRunner):
    """An engine that fails on its own account, with a stack trace."""

    def run_pipeline(self, pipeline: object, options: object) -> object:
        del pipeline, options
        raise RuntimeError("No worker is left.\n\tat Engine.java:7")


OPTIONS = {
    "batches": "--batch-size 10 --epochs 1 --sampler poisson",
    "prepare": "--schema schema.toml",
}
SCHEMA = """
version = 1
[columns.id]
kind = "numeric"
[columns.label]
kind = "label"
task = "binary"
"""


@pytest.mark.parametrize("name", OPTIONS)
def test_a_failure_of_the_engine_is_one_line(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "rows.parquet", 0, 20, 10)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    files = ["--input", "rows.parquet", "--out", "out"]
    runner = f"--runner={__name__}.LostRunner"
    ran = command(name, *files, *OPTIONS[name].split(), runner)
    assert ran.code == 2, ran.printed
    assert ran.printed.splitlines()[-1] == (
        "error: Expected the engine to finish the job: RuntimeError: No worker is "
        "left. See what it logged; then run the same command again."
    )
    assert "Engine.java" not in ran.printed
    assert "Traceback" not in ran.printed


def fault(item: str) -> None:
    """Raises an error that quotes a row."""
    raise ValueError(f"cannot parse {item}")


def full_disk(item: str) -> None:
    """Raises what the system raises."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out")


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (fault, r"^Expected no ValueError in fault \(test_engine_tasks.py:\d+\)"),
        (full_disk, r"^Expected files to be written and read: No space left"),
    ],
)
def test_an_error_of_a_task_is_one_line_and_quotes_nothing(
    task: Callable[[str], None], says: str
) -> None:
    options = PipelineOptions(["--runner=FnApiRunner"])
    with pytest.raises(InputError, match=says) as error:
        engine_tasks.run_on_engine(options, task, ["canary"])
    assert "\n" not in str(error.value)
    assert "canary" not in str(error.value)


def test_a_bug_on_the_local_runner_keeps_its_traceback() -> None:
    pipeline = beam.Pipeline("FnApiRunner")
    _ = pipeline | beam.Create([0]) | beam.Map(lambda number: 1 // number)
    with pytest.raises(ZeroDivisionError):
        engine_tasks.run_to_end(pipeline)


@pytest.mark.parametrize("kind", [InputError, StorageError])
def test_an_error_in_the_traceback_of_an_engine_is_one_line(kind: type) -> None:
    text = f"failed:\na.{kind.__name__}: Expected a disk [while running s]"
    found = engine_tasks._one_line(RuntimeError(text), beam.Pipeline())
    assert type(found) is kind
    assert str(found) == "Expected a disk"


class Engine:
    """A pipeline and its job: the job ends when it is cancelled.

    Args:
      signal_in: In which of its calls the process is asked to stop.
    """

    def __init__(self, signal_in: str) -> None:
        self._signal_in = signal_in
        self._end = threading.Event()
        self.calls: list[str] = []
        self.told = threading.Event()

    def _enter(self, name: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.calls.append(name)
        if name == self._signal_in:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(self) -> Engine:
        self._enter("run")
        if self._signal_in == "run":
            self.told.wait(600)  # it takes the job after all
        return self

    def wait_until_finish(self) -> None:
        self._enter("wait_until_finish")
        assert self._end.wait(600)
        raise RuntimeError("CANCELLED")

    def cancel(self) -> None:
        self.calls.append("cancel")
        self._end.set()


@pytest.mark.parametrize("signal_in", ["run", "wait_until_finish"])
def test_a_signal_cancels_the_job_of_an_engine(
    signal_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(signal_in)
    cancel = engine_tasks._cancel

    def tell(jobs: list[Engine]) -> None:
        cancel(jobs)
        engine.told.set()

    monkeypatch.setattr(engine_tasks, "_cancel", tell)
    with pytest.raises(StoppedError), stoppable():
        engine_tasks.run_to_end(engine)
    assert "cancel" in engine.calls
