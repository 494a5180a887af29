"""Workers that agree on what they do, before and between the steps.

Formal guarantees:
  - If the work of ``together`` raises an InputError at one worker, ``together`` raises
    it at every worker.  It names the first that failed, unless that is the chief or all
    failed alike.
  - ``compare`` refuses workers with a value that differs from the chief's, and names
    workers and value.  They exchange digests.
  - ``settle_step`` accepts a step only if the workers together have its parts 0, 1,
    ..., each once, as many as the plan says; others by a chance of one in 2^40.
  - If a worker has received a stop signal, ``settle_step`` returns it at every worker;
    once they stop by it, signals that reach others later change nothing.
  - The chief alone reports an error that all workers know of.

Public: what is compared, and which workers differ.  Sensitive: the parts of a step.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import json
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError
from pipelines.files.processes import StoppedError, ignore_signals
from trainer.core.step.workers import TakenStep, Workers

_Result = TypeVar("_Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_REMEDIES = {"batches": "Give all of them the same folder, or copies of it."}
_REMEDY = "Start all of them by one command, with the same software and code."


class AgreedError(InputError):
    """An error that all workers know of."""


class AgreedStopError(StoppedError):
    """A stop signal that all workers know of."""


class Group(Workers):
    """Several workers, which exchange bytes and sums."""

    @abc.abstractmethod
    def gather(self, value: bytes) -> list[bytes]:
        """Returns the ``value`` of every worker, by rank.

        Args:
          value: Bytes of any number, which may differ between workers.
        """

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Returns ``work()``, as `Workers.together`; names the worker that failed."""
        refusal = b""
        try:
            result = work()
        except InputError as error:
            refusal = str(error).encode()
        refusals = self.gather(refusal)
        if any(refusals):
            names = _names(self)
            [rank, text] = next((r, t.decode()) for r, t in enumerate(refusals) if t)
            everybody = all(found == refusals[0] for found in refusals)
            who = "" if everybody or not rank else f"{names[rank]}: "
            leave(self, AgreedError(f"{who}{text}"))
        return result

    def chiefs(self, value: bytes) -> bytes:
        """Returns the chief's ``value``, as `Workers.chiefs`."""
        return self.gather(value if self.is_chief else b"")[0]

    def compare(self, values: Mapping[str, Any]) -> None:
        """Accepts equal values; arguments as for `Workers.compare`."""
        digests = {n: fingerprint([value]) for n, value in _fields(values).items()}
        found = [json.loads(one) for one in self.gather(json.dumps(digests).encode())]
        for name in dict.fromkeys(name for one in found for name in one):
            values_of = [one.get(name) for one in found]
            others = [r for r, value in enumerate(values_of) if value != values_of[0]]
            if others:
                _refuse(self, name, others)

    def settle_step(self, taken: TakenStep) -> int | None:
        """Accepts the parts of a step, as `Workers.settle_step`."""
        asked = [int(taken.signal_number == one) for one in _SIGNALS]
        failed = int(taken.failure is not None)
        # Sums of marks need one exchange, and tell 0, 1, ... from all others.
        marks = sum(map(_mark, taken.parts))
        mine = np.array([len(taken.parts), marks, failed, *asked], np.int64)
        count, marks, failures, *signals = self.sum(mine).tolist()
        if failures:
            self.together(lambda: _raise(taken.failure))
        wanted = taken.parts_per_step or max(1, count)
        if count != wanted or marks != sum(map(_mark, range(count))):
            text = (
                f"Expected the workers to have each part of step {taken.step} once; "
                "they do not. Give all of them the same batches, then the same command "
                "again."
            )
            leave(self, AgreedError(text))
        numbers = [
            int(one) for one, seen in zip(_SIGNALS, signals, strict=True) if seen
        ]
        return max(numbers, default=None)


def _raise(failure: InputError | None) -> None:
    if failure is not None:
        raise failure


def leave(workers: Workers, error: AgreedError | AgreedStopError) -> NoReturn:
    """Ends this worker by an error that all workers know of; the chief reports it.

    Args:
      workers: All workers of the run; each calls this.
      error: The error, the same at every worker.

    Raises:
      AgreedError, AgreedStopError: ``error``, at the chief.
      SystemExit: at the other workers.
    """
    if isinstance(error, AgreedStopError) and workers.count > 1:
        ignore_signals()  # the launcher's reaches each worker at a time of its own
    if workers.is_chief:
        raise error
    raise SystemExit(error.exit_status if isinstance(error, AgreedStopError) else 2)


def same_arrays(workers: Workers, arrays: Iterable[np.ndarray], step: int) -> None:
    """Accepts workers whose weights are the same bits.

    Args:
      workers: All workers of the run; each calls this.
      arrays: The weights and all other state of a step; not read for a single worker.
      step: Number of steps that were taken.

    Raises:
      AgreedError: workers differ; the message names them.
    """
    if not isinstance(workers, Group):
        return
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    found = workers.gather(digest.digest())
    others = [rank for rank, one in enumerate(found) if one != found[0]]
    if others:
        names = _names(workers)
        leave(
            workers,
            AgreedError(
                f"Expected the same weights at all workers after step {step}; those of "
                f"{' and '.join(names[rank] for rank in others)} differ from those of "
                f"{names[0]}: a processor or its memory gives other results. Leave out "
                "that host, then give the same command again."
            ),
        )


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name} {field}".strip(): value
        for name, fields in values.items()
        for field, value in (
            fields.items() if isinstance(fields, dict) else [("", fields)]
        )
    }


def _refuse(workers: Group, name: str, others: Sequence[int]) -> NoReturn:
    names = _names(workers)
    remedies = (text for start, text in _REMEDIES.items() if name.startswith(start))
    leave(
        workers,
        AgreedError(
            f"Expected the same {name} at all workers; "
            f"{' and '.join(names[rank] for rank in others)} differs from {names[0]}. "
            f"{next(remedies, _REMEDY)}"
        ),
    )


def _names(workers: Group) -> list[str]:
    hosts = workers.gather(socket.gethostname().encode())
    return [f"worker {rank} on {host.decode()}" for rank, host in enumerate(hosts)]


@functools.cache
def _mark(part: int) -> int:
    """Returns 40 bits that look random: sums of a million of them fit int64."""
    return int.from_bytes(hashlib.sha256(b"%d" % part).digest()[:5], "big")
