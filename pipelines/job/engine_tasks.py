"""Pipelines, and independent tasks, that run to their end on an engine of Apache Beam.

When `run_to_end` returns or raises, nothing of the pipeline runs any more in this
process, and a signal has cancelled the engine's job.  When `run_on_engine` returns,
every task ran to its end at least once: an engine may run a task again, or twice at
once.  A worker's InputError is raised here as the same InputError, and a failure of the
engine as an InputError of one line.  Any other error of a task is raised with its type
and place alone.
"""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability import job_server
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from accounting.core.validation import InputError
from pipelines.job import runtime
from pipelines.job.runtime import AGAIN, StorageError, plain_errors


def run_to_end(pipeline: beam.Pipeline) -> None:
    """Runs a pipeline; returns or raises once nothing of it runs any more.

    It runs in a separate thread: a signal, which raises in the main thread, would
    interrupt Beam's code with locks held and objects half made.

    Raises:
      InputError: a worker raised it, or the engine failed.
    """
    given_up, jobs = threading.Event(), list[Any]()
    outcome, told = list[BaseException | None](), queue.SimpleQueue[None]()

    def run() -> None:
        try:
            _run_jobs(pipeline, jobs, given_up)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)
        told.put(None)

    def wait() -> None:
        # After an interruption, Thread.join would report that the thread has ended.
        while not outcome:
            with contextlib.suppress(queue.Empty):
                told.get(timeout=1)

    thread = threading.Thread(target=run, daemon=True)
    with runtime.ending_at(given_up):
        try:
            thread.start()
            wait()
        except BaseException:
            given_up.set()
            _cancel(jobs)
            # Otherwise it has ended, or will see that it is given up.
            if thread.is_alive():
                wait()
            raise
    for error in filter(None, outcome):
        _cancel(jobs)
        if line := _one_line(error, pipeline):
            raise line from error
        raise error


def _run_jobs(
    pipeline: beam.Pipeline, jobs: list[Any], given_up: threading.Event
) -> None:
    """Starts the job of a pipeline, appends it to ``jobs``, and waits for its end."""
    if not given_up.is_set():
        with _no_signals_for_beam():
            jobs.append(pipeline.run())
    if given_up.is_set():  # while the engine accepted the job
        _cancel(jobs)
    for job in jobs:
        job.wait_until_finish()


@contextlib.contextmanager
def _no_signals_for_beam() -> Iterator[None]:
    """Keeps the job server that Beam starts from installing a handler of SIGINT.

    Only the main thread may install one, and ``stoppable`` does.  The server also stops
    when the process exits.
    """
    theirs: Any = types.SimpleNamespace(
        SIGINT=signal.SIGINT, getsignal=signal.getsignal, signal=lambda *_: None
    )
    before, job_server.signal = job_server.signal, theirs
    try:
        yield
    finally:
        job_server.signal = before


def _cancel(jobs: list[Any]) -> None:
    """Asks an engine to cancel jobs."""
    with contextlib.suppress(Exception):
        for job in jobs:
            job.cancel()


def run_on_engine(
    options: PipelineOptions, task: Callable[[Any], None], items: Sequence[Any]
) -> None:
    """Calls ``task`` with every item, on the workers of an engine.

    Args:
      options: Beam's options: the runner and its settings.
      task: Function of one item, picklable.
      items: Picklable items, which are spread over the workers.

    Raises:
      InputError: as for ``run_to_end``.
    """
    pipeline = beam.Pipeline(options=options)
    _ = (
        pipeline
        | beam.Create(list(items))  # spread over the workers
        | beam.Map(_unless_stopped, task).with_output_types(type(None))
    )
    run_to_end(pipeline)


def _unless_stopped(item: Any, task: Callable[[Any], None]) -> None:
    runtime.advance(runtime.TASKS, 0)
    with plain_errors():
        task(item)


def _one_line(error: BaseException, pipeline: beam.Pipeline) -> InputError | None:
    """Returns a worker's InputError, or one for an engine that failed; else None.

    Beam raises a worker's error as it is, as another error, or as a traceback that ends
    with the step.  Of an engine's own error the first line is kept.  Any other error of
    the local runner is a bug, which needs its traceback.
    """
    text = f"{type(error).__name__}: {error}"
    known = r"(InputError|StorageError): (.*?)(?: \[while running .*)?$"
    found = re.findall(known, text, re.M)
    if found:
        kind, message = found[-1]
        return StorageError(message) if kind == "StorageError" else InputError(message)
    if not isinstance(error, Exception) or isinstance(pipeline.runner, FnApiRunner):
        return None
    return InputError(
        f"Expected the engine to finish the job: {text.splitlines()[0].rstrip('.')}. "
        f"See what it logged; then {AGAIN}"
    )
