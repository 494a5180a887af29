"""The number of TensorFlow's threads, on which the last bits of a sum depend.

TensorFlow splits a large sum into one part per thread, with one thread per core by
default.  A fixed number of threads gives the same bits on any number of cores.

Formal guarantees:
  - After ``fix`` the numbers of threads are fixed to the requested ones, or it raises.
  - A new run gets as many threads as TensorFlow would use by default.

If TensorFlow has already started with default numbers, it is assumed to have started
with as many cores as are available now.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from accounting.core.validation import InputError
from pipelines.core.threads import num_cores
from trainer.tf_compat import tf

#: Threads within one operation, and operations that run concurrently.
_KINDS = ("intra_op", "inter_op")


def fix(recorded: Mapping[str, int] | None) -> None:
    """Sets the numbers of threads.

    Args:
      recorded: The numbers that a run began with; None for a new run.

    Raises:
      InputError: TensorFlow already runs in this process with other numbers.
    """
    for kind in _KINDS:
        wanted = recorded[kind] if recorded else _number(kind)
        # A TensorFlow that has started refuses, and keeps its numbers.
        with contextlib.suppress(RuntimeError):
            _of(kind, "set")(wanted)
    found = current()
    if recorded and found != recorded:
        raise InputError(
            f"Expected TensorFlow with {recorded['intra_op']} and "
            f"{recorded['inter_op']} threads, with which this run began; in this "
            f"process it runs with {found['intra_op']} and {found['inter_op']}, and "
            "rounds otherwise. Give the same command in a new process."
        )


def current() -> dict[str, int]:
    """Returns the numbers of threads, by kind."""
    return {kind: _number(kind) for kind in _KINDS}


def _of(kind: str, what: str) -> Any:
    return getattr(tf.config.threading, f"{what}_{kind}_parallelism_threads")


def _number(kind: str) -> int:
    """Returns the number that was set, or TensorFlow's default."""
    variable = f"TF_NUM_{kind.replace('_', '').upper()}_THREADS"
    given = os.environ.get(variable, "")
    default = int(given) if given.isdigit() else 0
    return _of(kind, "get")() or default or num_cores()
