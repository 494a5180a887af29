"""Errors of a worker in one line, which names no row.

Formal guarantees:
  - An error in a worker is an InputError of one line, which names no row.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

from accounting.core.validation import InputError

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
