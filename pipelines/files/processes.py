"""Commands that a signal stops, and function calls in processes of their own.

*Signals.*  A command that SIGINT or SIGTERM stops cleans up and prints one line.  The
signal raises an exception that is not an ``Exception``: no library handles it as a
failure of its own, which it may retry, log with a traceback, or ignore.  Whatever a
library raises instead, `stoppable` ends in `StoppedError`.  When a context ends, the
earlier handlers are restored; after `ignore_signals`, signals stay ignored.

*Processes.*  Beam and TensorFlow each run in a separate process: they start threads,
install signal handlers and keep memory.  Python objects go in and out by pipes.  The
function is given by name, so that this process does not load its modules, and runs in a
fresh interpreter that finds the same modules; unlike with ``multiprocessing``, the
caller's script or notebook is not run again.  An InputError, OSError or StoppedError
that is raised there is raised here; any other end of the process is an InputError that
says so.  An exception that ends the wait, such as that of a signal, ends the other
process too, and the end of this process stops the other as by SIGTERM.

References:
  Exit status 128 + number of the signal: POSIX.1-2017, Shell Command Language, section
  2.8.2, and common practice (130 for SIGINT, 143 for SIGTERM).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from accounting.core.validation import InputError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN = "Stopped by a signal. Give the same command again."
#: For commands that resume their work.
RESUMES = f"{_AGAIN.rstrip('.')}: it goes on where it stopped."


class StoppedError(KeyboardInterrupt):
    """A signal stopped the command, or the cell of a notebook.

    Args:
      message: One line for the user.
      number: Number of the signal.
    """

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        # Libraries that add to a message make a new exception from ``args``.
        super().__init__(message, number)
        self.number = number

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def exit_status(self) -> int:
        """Exit status that a shell reports for a process that the signal ended."""
        return 128 + self.number


@contextlib.contextmanager
def on_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Calls ``handler(number)`` for every signal; does nothing outside the main thread.

    Python delivers signals only to the main thread.
    """
    before = {}
    for number in _SIGNALS:
        with contextlib.suppress(ValueError):
            before[number] = signal.signal(number, lambda number, _: handler(number))
    try:
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, old)


def ignore_signals() -> None:
    """Ignores signals for good, in a process that is about to end."""
    for number in _SIGNALS:
        with contextlib.suppress(ValueError):  # as in ``on_signals``
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stoppable(message: str = _AGAIN) -> Iterator[None]:
    """Turns a signal into a StoppedError.

    Args:
      message: One line with what the user can do next.

    Raises:
      StoppedError: a signal arrived.
    """
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        raise StoppedError(message, number)

    try:
        with on_signals(stop):
            yield
    except BaseException:
        if received:
            raise StoppedError(message, received[0]) from None
        raise


# --- Function calls -----------------------------------------------------------------

#: As a module of its own, this one would have another ``StoppedError``.
_MAIN = f"from {__name__} import _main; _main()"


def call(function: str, *arguments: Any) -> Any:
    """Calls a function in a separate process and returns its result.

    Args:
      function: "module:function".  Its result must be picklable.
      *arguments: Picklable arguments.

    Example:
      >>> call("math:gcd", 12, 18)
      6

    Raises:
      InputError: the function raised it, or its process ended without a result.
    """
    # "" stands for the current folder of this process.
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", _MAIN, function],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            sent = _exchanged(process, pickle.dumps(arguments))
        finally:
            process.kill()  # if it has not ended
    if process.returncode == -signal.SIGKILL:
        raise InputError(
            f"Expected enough memory for {function}, whose process the system ended. "
            "Free some, or make batches with a smaller --physical-batch-size."
        )
    if process.returncode:
        raise InputError(
            f"Expected {function} to end with a result; what it said is above (exit "
            f"status {process.returncode})."
        )
    result, error = pickle.loads(sent)
    if error is not None:
        raise error
    return result


def _exchanged(process: subprocess.Popen[bytes], arguments: bytes) -> bytes:
    """Sends arguments, waits for the end, and returns what was sent back."""
    assert process.stdin is not None
    assert process.stdout is not None
    # A process that has ended already is reported by its exit status.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(arguments)
        process.stdin.flush()
    # It stays open: the other process takes its end for the end of its caller.
    sent = process.stdout.read()
    process.wait()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return sent


def _main() -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as results:
        # Libraries that print must not write into the result.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        results.write(pickle.dumps(_outcome(sys.argv[1])))


def _outcome(function: str) -> tuple[Any, BaseException | None]:
    module, name = function.split(":")
    try:
        with stoppable():
            arguments = pickle.load(sys.stdin.buffer)
            threading.Thread(target=_end_with_caller, daemon=True).start()
            return getattr(importlib.import_module(module), name)(*arguments), None
    except (InputError, OSError, StoppedError) as error:
        return None, error


def _end_with_caller() -> None:
    """Stops this process when its standard input ends, as it does with the caller."""
    # A buffered read would hold a lock at exit.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
