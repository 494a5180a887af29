"""Where the tasks of a job run, threads or an engine; and their errors in one line.

Formal guarantees:
  - When ``Runtime.run`` returns, every task ran to its end at least once.
  - When an error ends it, tasks on threads stop at their next report of progress.
  - An error in a worker is an InputError of one line, which names no row.

Public: progress.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accounting.core.validation import InputError, check_int
from pipelines.core.threads import in_order, num_cores
from pipelines.job import progress

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
          task: The task; on threads it reports by ``progress.advance``.
          items: The items.

        Raises:
          InputError, OSError: a task raised it, or the engine failed.
        """
        if self.run_tasks is not None:
            self.run_tasks(task, items)
            return
        stopped, num_threads = threading.Event(), self.num_threads or num_cores()
        with progress.ending_at(stopped), ThreadPoolExecutor(num_threads) as pool:
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
