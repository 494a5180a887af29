"""What the DoFns share: errors, threads, and the check of delivered elements.

Formal guarantees:
  - An error in a worker is an InputError of one line, which names no row.
  - A bundle ends after all of its work, or with an error; an abandoned bundle writes
    nothing more.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import apache_beam as beam

from accounting.validation import InputError

#: How to finish a job that failed.
AGAIN = "run the same command again: it goes on where it stopped."


def storage_error(error: OSError) -> InputError:
    """Returns the error for a full disk or a lost file."""
    reason = error.strerror or type(error).__name__
    where = f" ({error.filename})" if isinstance(error.filename, str) else ""
    return InputError(
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
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        raise InputError(
            f"Expected no {type(error).__name__} in {frame.name} ({place}). If it is "
            f"not a fault of this machine, report it; then {AGAIN}"
        ) from None


def check_delivery(found: Iterable[int], expected: Sequence[int]) -> None:
    """Checks that each of the expected elements was delivered once.

    Args:
      found: Numbers of the delivered elements.
      expected: Numbers of the sent elements, ascending.

    Raises:
      InputError: the engine lost or repeated elements.
    """
    delivered = sorted(found)
    if delivered != list(expected):
        raise InputError(
            f"Expected the engine to deliver each of {len(expected)} elements once; "
            f"it delivered {len(delivered)}. Run the job again, on a runner that loses "
            "and repeats nothing."
        )


class BundleFn(beam.DoFn):
    """Runs the jobs of a bundle on threads; the bundle ends after all of its jobs.

    The output of a job is known before it runs.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def start_bundle(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads)
        self._jobs: list[concurrent.futures.Future[None]] = []

    def _run(self, job: Callable[..., None], *arguments: object) -> None:
        if self._num_threads == 1:
            job(*arguments)  # at once, so that the engine sees progress
        else:
            self._jobs.append(self._pool.submit(job, *arguments))

    def finish_bundle(self) -> None:
        try:
            for job in concurrent.futures.as_completed(self._jobs):
                job.result()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def teardown(self) -> None:
        # An abandoned bundle is not finished, and must write nothing more.
        if hasattr(self, "_pool"):
            self._pool.shutdown(cancel_futures=True)
