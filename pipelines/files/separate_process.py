"""A function call in a process of its own, with Python objects in and out.

Beam and TensorFlow each get a process: they start threads, install signal handlers and
keep memory.  The function is named, not imported, so that this process does not load
the modules that it needs.

Formal guarantees:
  - The function runs in a fresh interpreter that finds the same modules; the caller's
    script or notebook is not run again, as ``multiprocessing`` would.
  - An InputError, OSError or StoppedError that is raised there is raised here.  If the
    process ends in any other way, an InputError says so.
  - An exception that ends the wait, such as that of a signal, ends the process too.
  - If this process ends, however it does, the other one is stopped as by SIGTERM.

Arguments and results go through pipes alone.
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
from typing import Any

from accounting.validation import InputError
from pipelines.files.stopping import StoppedError, stoppable


class Process:
    """A function call that has begun.  `multiprocessing.connection.wait` takes it.

    Args:
      function: "module:function".
      *arguments: Picklable, as is the result.
    """

    def __init__(self, function: str, *arguments: Any) -> None:
        self._function = function
        # The first part of the path may be this folder, whatever it is, as "".
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._input, self._results = self._process.stdin, self._process.stdout
        assert self._input is not None
        # If it has ended already, its exit status says so.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(pickle.dumps(arguments))
            self._input.flush()

    def fileno(self) -> int:
        """Returns a file descriptor that is readable once there is a result."""
        assert self._results is not None
        return self._results.fileno()

    def result(self) -> Any:
        """Waits for the end, and returns what the function returned.

        Raises:
          InputError: the function raised it, or its process ended without a result.
        """
        assert self._results is not None
        sent = self._results.read()
        status = self._process.wait()
        self._close()
        if status:
            raise InputError(
                f"Expected {self._function} to end with a result; the exit status of "
                f"its process is {status}. What it said is above."
            )
        result, error = pickle.loads(sent)
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """Asks the process to end, as a signal to stop does."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()

    def wait(self) -> None:
        """Waits for the end, whatever the result."""
        self._process.wait()
        self._close()

    def _close(self) -> None:
        assert self._input is not None
        assert self._results is not None
        # Until now it was open: to the other process its end is that of this one.
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._results.close()


def call(function: str, *arguments: Any) -> Any:
    """Calls a function in a process of its own and returns its result.

    Args:
      function: "module:function".
      *arguments: Picklable, as is the result.

    Example:
      >>> call("math:gcd", 12, 18)
      6

    Raises:
      InputError: the function raised it, or its process ended without a result.
    """
    process = Process(function, *arguments)
    try:
        return process.result()
    finally:
        process.kill()  # if it has not ended
        process.wait()


def _main() -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as results:
        # What libraries print is no part of the result.
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
    """Stops this process when its standard input ends: that of the caller did."""
    # A buffered read would hold a lock at exit.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _main()
