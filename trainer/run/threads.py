"""The number of threads of TensorFlow, which a sum's last bits depend on.

TensorFlow splits a large sum into one part per thread, and has one thread per core by
default.  With a fixed number of threads it gives the same bits on any number of cores.

Formal guarantees:
  - After ``fix`` the numbers of threads are fixed to those asked for, or it raises.
  - A run that begins gets as many threads as TensorFlow would have taken.

If TensorFlow has started already and nobody set a number, the cores that the process
may use now are assumed to be those that it started with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from accounting.validation import InputError
from pipelines.files.threads import num_cores
from trainer.tf_compat import tf

#: Within an operation, and of operations at a time.
_KINDS = ("intra_op", "inter_op")


def fix(recorded: Mapping[str, int] | None) -> None:
    """Sets the numbers of threads.

    Args:
      recorded: What a run began with; None for a run that begins.

    Raises:
      InputError: TensorFlow runs in this process already, with other numbers.
    """
    for kind in _KINDS:
        wanted = recorded[kind] if recorded else _number(kind)
        # A TensorFlow that runs already keeps what it has.
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
    """Returns what was set, or what TensorFlow takes by itself."""
    variable = f"TF_NUM_{kind.replace('_', '').upper()}_THREADS"
    given = os.environ.get(variable, "")
    default = int(given) if given.isdigit() else 0
    return _of(kind, "get")() or default or num_cores()
