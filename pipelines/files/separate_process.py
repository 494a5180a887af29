"""A function call in a separate process, with Python objects in and out, by pipes.

Beam and TensorFlow each run in a separate process: they start threads, install signal
handlers and keep memory.  The function is given by name, so that this process does not
load its modules.

Formal guarantees:
  - The function runs in a fresh interpreter that finds the same modules; unlike with
    ``multiprocessing``, the caller's script or notebook is not run again.
  - An InputError, OSError or StoppedError that is raised there is raised here.  If the
    process ends in any other way, an InputError says so.
  - An exception that ends the wait, such as that of a signal, ends the process too.
  - If this process ends in any way, the other one is stopped as by SIGTERM.
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

from accounting.core.validation import InputError
from pipelines.files.stopping import StoppedError, stoppable


class Process:
    """A running call; arguments as for `call`.

    ``multiprocessing.connection.wait`` accepts it.
    """

    def __init__(self, function: str, *arguments: Any) -> None:
        self._function = function
        # "" stands for the current folder of this process.
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._input, self._results = self._process.stdin, self._process.stdout
        assert self._input is not None
        # A process that has ended already is reported by its exit status.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(pickle.dumps(arguments))
            self._input.flush()

    def fileno(self) -> int:
        """Returns a file descriptor that is readable once there is a result."""
        assert self._results is not None
        return self._results.fileno()

    def result(self) -> Any:
        """Waits for the end, and returns the result; raises as ``call`` does."""
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
        """Asks the process to end, by SIGTERM."""
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
        # The other process takes the end of this pipe for the end of its caller.
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._results.close()


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
    process = Process(function, *arguments)
    try:
        return process.result()
    finally:
        process.kill()  # if it has not ended
        process.wait()


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


if __name__ == "__main__":
    _main()
