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
        [sys.executable, "-m", __name__, function],
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
            f"Expected enough memory for {function}: the system ended its process, as "
            "it does if memory is short. Free some, or make batches with a smaller "
            "--physical-batch-size."
        )
    if process.returncode:
        raise InputError(
            f"Expected {function} to end with a result; the exit status of its process "
            f"is {process.returncode}. What it said is above."
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


if __name__ == "__main__":
    _main()
