"""What the workers of a run agree on, before its steps and between them.

Formal guarantees:
  - ``together`` raises at every worker if it raised at one, and says which.
  - ``compare`` refuses workers of which a value is another than the chief's, and names
    them and the value.  Digests travel, under a key: never a value, nor a key.
  - ``settle_step`` accepts a step whose parts the workers have together: 0, 1, ...,
    each once, as many as the plan says.
  - A signal that one worker received by then is the answer at all of them.
  - An error that all know of is said by the chief alone.

Public: what is compared, and who differs.  Sensitive: the key and the parts of a step.
"""

from __future__ import annotations

import hashlib
import json
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from accounting.plan import fingerprint
from accounting.validation import InputError
from pipelines.files.stopping import StoppedError
from pipelines.sampling.keys import derive
from trainer.workers.base import Workers

_Result = TypeVar("_Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_REMEDIES = {
    "noise key": "Give all of them the same file by --noise-key-file.",
    "batches": "Give all of them the same folder, or copies of it.",
    "threads": "Give `export TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1` on "
    "every host, or as many as each has cores.",
}
_REMEDY = "Start all of them by one command, with the same software and code."


class AgreedError(InputError):
    """An error that every worker knows of."""


class AgreedStopError(StoppedError):
    """A signal to stop that every worker knows of."""


def is_chief(workers: Workers) -> bool:
    """Whether this worker writes, evaluates and speaks for all."""
    return workers.rank == 0


def leave(workers: Workers, error: AgreedError | AgreedStopError) -> NoReturn:
    """Ends this worker by an error of all of them; the chief says it.

    Args:
      workers: Who end.
      error: The same at each.

    Raises:
      AgreedError, AgreedStopError: ``error``, at the chief.
      SystemExit: at the others.
    """
    if is_chief(workers):
        raise error
    raise SystemExit(error.exit_status if isinstance(error, AgreedStopError) else 2)


def together(workers: Workers, work: Callable[[], _Result]) -> _Result:
    """Returns ``work()``, once every worker has done its own.

    Args:
      workers: All of them; each calls this.
      work: What this worker does; it asks nobody.

    Raises:
      InputError: it was raised at this worker or at another.
    """
    if workers.count == 1:
        return work()
    refusal = b""
    try:
        result = work()
    except InputError as error:
        refusal = str(error).encode()
    refusals = workers.gather(refusal)
    if any(refusals):
        names = _names(workers)
        [rank, text] = next((r, t.decode()) for r, t in enumerate(refusals) if t)
        everybody = all(found == refusals[0] for found in refusals)
        who = "" if everybody or not rank else f"{names[rank]}: "
        leave(workers, AgreedError(f"{who}{text}"))
    return result


def chiefs(workers: Workers, value: bytes) -> bytes:
    """Returns the chief's ``value``; what others give is left out.

    Args:
      workers: All of them; each calls this.
      value: Value of this worker.
    """
    return workers.gather(value if is_chief(workers) else b"")[0]


def compare(workers: Workers, values: Mapping[str, Any], key: bytes) -> None:
    """Accepts workers with the same values, and the same key.

    Args:
      workers: All of them; each calls this.
      values: What has to be the same, as JSON, by name; of objects each field.
      key: The noise key.  Sensitive.

    Raises:
      AgreedError: who differs, and in what.
    """
    if workers.count == 1:
        return
    named = {"noise key": "", **_fields(values)}
    digests = {
        name: derive(key, "agreement", name, fingerprint([value])).hex()
        for name, value in named.items()
    }
    found = [json.loads(one) for one in workers.gather(json.dumps(digests).encode())]
    for name in dict.fromkeys(name for one in found for name in one):
        values_of = [one.get(name) for one in found]
        others = [r for r, value in enumerate(values_of) if value != values_of[0]]
        if others:
            _refuse(workers, name, others)


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name} {field}".strip(): value
        for name, fields in values.items()
        for field, value in (
            fields.items() if isinstance(fields, dict) else [("", fields)]
        )
    }


def _refuse(workers: Workers, name: str, others: Sequence[int]) -> NoReturn:
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


def _names(workers: Workers) -> list[str]:
    hosts = workers.gather(socket.gethostname().encode())
    return [f"worker {rank} on {host.decode()}" for rank, host in enumerate(hosts)]


def same_arrays(workers: Workers, arrays: Iterable[np.ndarray], step: int) -> None:
    """Accepts workers whose weights are the same bits.

    Args:
      workers: All of them; each calls this.
      arrays: The weights, and what else a next step depends on; one worker makes none.
      step: Steps that they have.

    Raises:
      AgreedError: who differs.
    """
    if workers.count == 1:
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
                f"{names[0]}: a processor or its memory computes otherwise. Leave out "
                "that host, then give the same command again."
            ),
        )


def settle_step(
    workers: Workers,
    step: int,
    parts: Sequence[int],
    parts_per_step: int | None,
    signal_number: int | None,
) -> int | None:
    """Accepts a step whose parts all workers have together, before it is finished.

    Args:
      workers: All of them; each calls this.
      step: Which step.
      parts: Which of its parts this worker has, each once.  Sensitive.
      parts_per_step: Of every step; None where it is data dependent.
      signal_number: Number of a stop signal that this worker received; None
        for none.

    Returns:
      The number of a signal that a worker received; None for none.

    Raises:
      AgreedError: a part is missing, or two workers have it.
    """
    asked = [int(signal_number == one) for one in _SIGNALS]
    squares = sum(part * part for part in parts)
    mine = np.array([len(parts), sum(parts), squares, *asked], np.int64)
    count, total, squares, *signals = workers.sum(mine).tolist()
    last = count - 1
    if (
        count != (parts_per_step or max(1, count))
        or total != last * count // 2
        or squares != last * count * (2 * last + 1) // 6
    ):
        leave(
            workers,
            AgreedError(
                f"Expected the workers to have each part of step {step} once; they do "
                "not. Give all of them the same batches, then the same command again."
            ),
        )
    numbers = [int(one) for one, seen in zip(_SIGNALS, signals, strict=True) if seen]
    return max(numbers, default=None)
