"""The runtime of jobs: steps of independent tasks, on threads or on an engine.

A task makes one file.  The files say what is done: in a job that was killed, by a
worker that an engine lost, and for the progress.

Formal guarantees:
  - When ``Runtime.run`` returns, the file of every task is there.
  - A task whose file is there is not run again.
  - An error of a file system is an InputError of one line.
  - When an error ends a step, its tasks on threads stop at their next ``SoFar``.
  - An error in a worker is an InputError of one line, which names no row.

Public: names and progress of steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accounting.core.validation import InputError, check_int
from pipelines.core.threads import in_order, num_cores
from pipelines.files.paths import StrPath
from pipelines.job import progress

#: ``on_progress(step, done, in all)``.
Progress = Callable[[str, int, int], None]
#: Calls a task with every item.
RunTasks = Callable[[Callable[[Any], None], Sequence[Any]], None]

#: Seconds between two looks at the files of a step, and between two reports of a task.
_SECONDS = 1.0


def _one(item: Any) -> int:
    del item
    return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskStep:
    """Tasks that may run in any order.

    Attributes:
      name: Name of the step, for the progress.
      task: Picklable function of an item, which makes its file; complete or not at all.
      items: The items.
      output: Picklable function of an item: the path of its file.
      size: Function of an item: its share of the progress.
    """

    name: str
    task: Callable[[Any], None]
    items: Sequence[Any]
    output: Callable[[Any], StrPath]
    size: Callable[[Any], int] = _one

    def left(self) -> list[Any]:
        """Returns the items whose files are not there."""
        return [item for item in self.items if not os.path.exists(self.output(item))]

    def progress(self) -> tuple[int, int]:
        """Returns how much is done, and how much there is."""
        total, left = sum(map(self.size, self.items)), self.left()
        begun = sum(_so_far(self.output(item)) for item in left)
        return total - sum(map(self.size, left)) + begun, total


def _unless_done(
    task: Callable[[Any], None], output: Callable[[Any], StrPath], item: Any
) -> None:
    if not os.path.exists(output(item)):
        task(item)


class SoFar:
    """Tells how much of a task is done, by a file beside its own.

    Args:
      output: Path of the task's file.
    """

    def __init__(self, output: StrPath) -> None:
        self._path, self._last = _path_so_far(output), time.monotonic()

    def __call__(self, done: int) -> None:
        """Tells it, at most every second; raises if the step was ended by an error."""
        progress.advance(progress.TASKS, 0)
        if time.monotonic() - self._last >= _SECONDS:
            self._path.write_text(str(done))
            self._last = time.monotonic()


def _path_so_far(output: StrPath) -> pathlib.Path:
    return pathlib.Path(f"{os.fspath(output)}.so-far")


def _so_far(output: StrPath) -> int:
    with contextlib.suppress(OSError, ValueError):  # not written, or only half
        return int(_path_so_far(output).read_text())
    return 0


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

    def in_percent(self) -> Runtime:
        """Returns this runtime with a progress that tells no size."""

        def tell(step: str, done: int, total: int) -> None:
            self.on_progress(step, 100 * done // max(total, 1), 100)

        return dataclasses.replace(self, on_progress=tell)

    def run(self, step: TaskStep) -> None:
        """Runs the tasks of a step whose files are not there.

        Raises:
          InputError: a task raised it, a file system or the engine failed, or tasks are
        lost.
        """
        run = self.run_tasks or functools.partial(
            _run_on_threads, self.num_threads or num_cores()
        )
        report = functools.partial(self._report, step)
        with progress.every(_SECONDS, report):
            if left := step.left():
                run(functools.partial(_unless_done, step.task, step.output), left)
        report()
        if lost := len(step.left()):
            raise StorageError(
                f"Expected every task of step {step.name} to be done; the engine "
                f"lost {lost}. To finish, {AGAIN}"
            )

    def _report(self, step: TaskStep) -> None:
        """Reports the progress of a step, by its files."""
        self.on_progress(step.name, *step.progress())


def _run_on_threads(
    num_threads: int, task: Callable[[Any], None], items: Sequence[Any]
) -> None:
    stopped = threading.Event()
    with progress.ending_at(stopped), ThreadPoolExecutor(num_threads) as pool:
        try:
            for _ in in_order(pool, task, items, num_threads):
                pass
        except OSError as error:
            stopped.set()
            raise storage_error(error) from None
        except BaseException:
            stopped.set()
            raise


#: How to finish a job that failed.
AGAIN = "run the same command again: it goes on where it stopped."


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
