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

Arguments and results go through pipes alone.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from typing import Any

from accounting.validation import InputError
from pipelines.files.stopping import StoppedError, stoppable


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
    # The first part of the path may be this folder, whatever it is, as "".
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", __name__, function],
        input=pickle.dumps(arguments),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode:
        raise InputError(
            f"Expected {function} to end with a result; the exit status of its process "
            f"is {done.returncode}. What it said is above."
        )
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return result


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
            return getattr(importlib.import_module(module), name)(*arguments), None
    except (InputError, OSError, StoppedError) as error:
        return None, error


if __name__ == "__main__":
    _main()
