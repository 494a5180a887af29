"""Where the tasks of a job run, threads or an engine: progress, and errors in one line.

On the local runner workers are threads of this process, which report by ``advance``.
On a cluster they are other processes; then ``poll`` counts what they have finished.

When ``Runtime.run`` returns, every task ran to its end at least once.  When an error
ends it, tasks on threads stop at their next report of progress.  An error in a worker
is an InputError of one line, which names no row.

Public: progress, in numbers of blocks read, of steps written, of blocks drawn in the
search for the order of a shuffle, and of bytes of tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accounting.core.validation import InputError, check_int
from pipelines.core.threads import in_order, num_cores

#: Kinds of progress.
BLOCKS, STEPS, STARTS, TASKS = "blocks", "steps", "boundaries", "tasks"

_listener: Callable[[str, int], None] | None = None


def advance(kind: str, amount: int = 1) -> None:
    """Reports progress.

    Args:
      kind: BLOCKS, STEPS, STARTS or TASKS.
      amount: Number done since the last report.
    """
    if _listener is not None:
        _listener(kind, amount)


@contextlib.contextmanager
def listen(listener: Callable[[str, int], None]) -> Iterator[None]:
    """Calls ``listener(kind, amount)`` for every report within the context."""
    global _listener
    _listener, before = listener, _listener
    try:
        yield
    finally:
        _listener = before


@contextlib.contextmanager
def ending_at(event: threading.Event) -> Iterator[None]:
    """Stops the workers of this process at their next report after ``event`` is set."""
    tell = _listener

    def check(kind: str, amount: int) -> None:
        if event.is_set():
            raise InputError("Stopped.")  # the setter of the event raises the reason
        if tell:
            tell(kind, amount)

    with listen(check):
        yield


@contextlib.contextmanager
def poll(count: Callable[[], dict[str, int]], seconds: float) -> Iterator[None]:
    """Reports the results of ``count`` instead of the workers' reports.

    Args:
      count: Returns kind -> number done so far.  Its OSErrors are ignored.
      seconds: Seconds between two counts.
    """
    tell, reported, ended = _listener, dict[str, int](), threading.Event()

    def report() -> None:
        with contextlib.suppress(OSError):
            for kind, done in count().items():
                if tell and done > reported.get(kind, 0):
                    tell(kind, done - reported.get(kind, 0))
                    reported[kind] = done

    def watch() -> None:
        while not ended.wait(seconds):
            report()
        report()

    thread = threading.Thread(target=watch, daemon=True)
    with listen(lambda *_: None):
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


#: ``on_progress(step, done, in all)``.
Progress = Callable[[str, int, int], None]
#: Calls a task with every item.
RunTasks = Callable[[Callable[[Any], None], Sequence[Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where the tasks of a job run.

    Attributes:
      run_tasks: Runs tasks on the workers of an engine, which must reach the files of
        the job under the same paths; None for threads of this process.
      num_threads: Number of these threads; None for the cores.
      on_progress: Called with the name of a step, how much is done, and in all.

    Raises:
      InputError: less than one thread.
    """

    run_tasks: RunTasks | None = None
    num_threads: int | None = None
    on_progress: Progress = lambda *_: None

    def __post_init__(self) -> None:
        if self.num_threads is not None:
            check_int("--threads", self.num_threads, at_least=1)

    def run(self, task: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Calls a picklable task with every item, in any order.

        Args:
          task: The task; on threads it reports by ``advance``.
          items: The items.

        Raises:
          InputError, OSError: a task raised it, or the engine failed.
        """
        if self.run_tasks is not None:
            self.run_tasks(task, items)
            return
        stopped, num_threads = threading.Event(), self.num_threads or num_cores()
        with ending_at(stopped), ThreadPoolExecutor(num_threads) as pool:
            try:
                for _ in in_order(pool, task, items, num_threads):
                    pass
            except BaseException:
                stopped.set()
                raise


#: How to finish a job that failed.
AGAIN = "run the same command again."


class StorageError(InputError):
    """A full disk or a lost file.  The job can go on."""


def storage_error(error: OSError) -> StorageError:
    """Returns the error for a full disk or a lost file."""
    reason = error.strerror or type(error).__name__
    where = f" ({error.filename})" if isinstance(error.filename, str) else ""
    return StorageError(
        f"Expected files to be written and read: {reason}{where}. Make room or restore "
        f"access, then {AGAIN}"
    )


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turns every error into an InputError of one line.

    Of an unexpected error only type and place are kept: its message may quote rows, and
    would reach the logs of the engine.
    """
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise storage_error(error) from None
    except MemoryError:
        raise InputError(
            "Expected enough memory for a task of the job. Free some, or lower "
            f"--memory-limit or the number of threads and workers; then {AGAIN}"
        ) from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        raise InputError(
            f"Expected no {type(error).__name__} in {frame.name} ({place}). If it is "
            f"not a fault of this machine, report it; then {AGAIN}"
        ) from None


def quiet_beam() -> None:
    """Lets only errors reach the terminal, each of them once.

    Beam warns, when it is loaded, of every cloud whose client is not installed, and its
    workers reset the level of the root logger: so a handler filters, and it is in place
    before Beam is loaded.  A worker's exception is logged with its traceback and then
    raised; the command line shows the raised one.  Threads that serve an engine end
    with an exception when it disconnects.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    handler = logging.getLogger().handlers[0]
    handler.setLevel(logging.ERROR)
    handler.addFilter(lambda record: not record.exc_info)
    handler.addFilter(lambda record: "Traceback (most" not in record.getMessage())
    threading.excepthook = lambda _: None
    from apache_beam.runners.worker import sdk_worker

    # An engine's worker in this process prints the traceback of a failed or cancelled
    # bundle at any time, even after the last line of the command.
    vars(sdk_worker)["print"] = lambda *_, **__: None
