"""The origin of a run: the settings, data, code and machine that it began with.

    RUN/private/origin.json

A step that is repeated after a kill gets the same noise.  If a single bit of its sum
changed, the difference of the two releases would be free of noise.  So a run resumes
only if all of these are unchanged:

    settings    of the request
    batches     their manifest and their bytes
    release     the source of this project
    versions    of TensorFlow and all other software that computes, and the C library
    variables   of the environment on which the last bits depend
    processor   its kind, instructions and caches, which determine the kernels
    devices     names of the accelerators
    threads     of TensorFlow, which split its sums; restored on resuming
    code        the files of the user's functions and layers, and their imports
    step        the computation of the traced step, whatever its code reads elsewhere
    values      of the variables and lookup tables that the step begins with

Formal guarantees:
  - A run whose origin differs in any of these is refused, in one line that names it.
  - The whole origin enters the key of the run: after an edit of the record the
    checkpoint is refused, and the noise differs.
  - A run that resumes with fewer or more cores uses the threads that it began with.

Not covered, unless the traced step shows it: packages other than those above.

Public: everything except the digest of the batches, which commits to the examples; the
file stays in ``private``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError
from pipelines.core.batches.stored import PRIVATE_NAME
from pipelines.core.files.json_files import pretty_json, read_json
from pipelines.core.files.local_files import write_atomically
from trainer.core.run import arithmetic, run_record
from trainer.core.run.checkpoints import CHECKPOINT_NAME

ORIGIN_NAME = "origin.json"

Origin = dict[str, Any]

_OR_ANEW = "or start again in an empty --out folder."
_WHY = "a repeated step would be a second release under the same noise"
_PARTS = {
    "settings", "batches", "release", "versions", "variables", "processor", "devices",
    "threads", "code", "step", "values",
}  # fmt: skip
#: Flags in Linux's processor description that name instruction sets for arithmetic.
_COMPUTES = re.compile(r"sse|avx|fma|amx|f16c|bmi|sve|sme|asimd|fp|bf16|i8mm|dot")
_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


def here(settings: Any, *batches: str) -> Origin:
    """Returns the parts of the origin that are known before TensorFlow is loaded.

    Args:
      settings: Settings of the request; a dataclass.
      batches: Texts that identify the batches.  Sensitive.

    Raises:
      InputError: the environment may change more than the last bits.
    """
    return {
        # As JSON returns them.
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "batches": fingerprint(batches),
        "release": _release(),
        "versions": _versions(),
        "variables": arithmetic.variables(),
        "processor": _processor(),
    }


@functools.cache
def _release() -> str:
    sources = hashlib.sha256()
    root = pathlib.Path(__file__).parents[3]
    for package in ("accounting", "pipelines", "trainer"):
        for path in sorted((root / package).glob("**/*.py")):
            sources.update(hashlib.sha256(path.read_bytes()).digest())
    return sources.hexdigest()


def _versions() -> dict[str, str]:
    versions = {**run_record.versions(), "libc": _libc()}
    # Clip weights have the same bits with and without it.
    del versions["tensorflow-privacy"]
    return versions


def _libc() -> str:
    # The C library computes the exponentials in the tails of normal noise.
    known = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})
    return (known and os.confstr("CS_GNU_LIBC_VERSION")) or platform.libc_ver()[1]


def _processor() -> dict[str, str]:
    found = {"machine": platform.machine(), **_caches()}
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {**found, "model": platform.processor()}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in _PROCESSOR:
            found[name] = value
        elif name in ("flags", "Features"):
            found["flags"] = " ".join(sorted(filter(_COMPUTES.match, value.split())))
    return found


def _caches() -> dict[str, str]:
    # Matrix products are split into blocks that fit the caches.
    found = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return {f"cache {path.parent.name}": path.read_text().strip() for path in found}


def _path(run: pathlib.Path) -> pathlib.Path:
    return run / PRIVATE_NAME / ORIGIN_NAME


def read(run: pathlib.Path) -> Origin | None:
    """Returns the recorded origin of a run; None if it drew no noise yet.

    Raises:
      InputError: the run drew noise but has no origin, or one of another format.
    """
    path = _path(run)
    if not path.exists():
        if (run / PRIVATE_NAME / CHECKPOINT_NAME).exists():
            raise InputError(
                f"Expected {path} beside the checkpoint, to say which code and machine "
                "the run began with; without it a step may be released twice. Restore "
                f"it if it was removed, {_OR_ANEW}"
            )
        return None
    found = read_json(path)
    if not isinstance(found, dict) or set(found) != _PARTS:
        raise InputError(
            f"Expected {path} to be as this release writes it. Restore it, {_OR_ANEW}"
        )
    return found


def write(run: pathlib.Path, origin: Origin) -> None:
    """Writes the origin of a run, before the run draws any noise.

    Args:
      run: The folder of the run.
      origin: All parts of the origin.
    """
    write_atomically(_path(run), pretty_json(origin), mode=0o600)


def check_here(recorded: Origin, found: Origin, edited: Sequence[str]) -> None:
    """Refuses to resume a run whose origin differs from what is found here.

    Args:
      recorded: Recorded origin of the run.
      found: From ``here``.
      edited: Files of the user's code that changed since the run began.

    Raises:
      InputError: settings, batches, code, software, environment or processor differ.
    """
    _check_request(recorded, found)
    if edited:
        _refuse(
            f"the code in {', '.join(edited)} to be as when this run began; it was "
            "edited since",
            "Restore it",
        )
    _check_versions(recorded["versions"], found["versions"])
    _check_variables(recorded["variables"], found["variables"])
    if found["processor"] != recorded["processor"]:
        _refuse(
            "a processor like that on which this run began "
            f"({_differences(recorded['processor'], found['processor'])})",
            "Give the same command on such a machine",
        )
    if found["release"] != recorded["release"]:
        _refuse(
            "the release of dpsgd with which this run began; its source differs now",
            "Go back to that release",
        )


def check_traced(recorded: Origin, found: Origin) -> None:
    """Refuses to resume a run whose traced step or devices changed.

    Args:
      recorded: Recorded origin of the run.
      found: All parts of the current origin.

    Raises:
      InputError: devices, the code of the model, or the computation of the step or a
        value that it begins with differ.
    """
    if found["devices"] != recorded["devices"]:
        _refuse(
            f"accelerators {recorded['devices']} as when this run began, not "
            f"{found['devices']}",
            "Give the same command on such a machine",
        )
    if found["code"] != recorded["code"]:
        then, now = recorded["code"], found["code"]
        names = [n for n in sorted({*then, *now}) if then.get(n) != now.get(n)]
        _refuse(
            f"the model to be made by the code that it was made by when this run "
            f"began; {', '.join(names)} differs",
            "Restore it",
        )
    for then, now in zip(recorded["values"], found["values"], strict=False):
        if then != now:
            _refuse(
                f"the {then[0]} of the step to hold what it held when this run began",
                "Restore what it is made from, and give the same command in a new "
                "process",
            )
    if found["step"] != recorded["step"] or found["values"] != recorded["values"]:
        _refuse(
            "the step to compute what it did when this run began; its code read "
            "another value, from a file or the environment, or was loaded before it "
            "was edited",
            "Restore that and give the same command in a new process",
        )


def _check_request(recorded: Origin, found: Origin) -> None:
    remedy = f"Give the same command as before, {_OR_ANEW}"
    for name, value in found["settings"].items():
        before = recorded["settings"].get(name)
        if value != before:
            raise InputError(
                f"Expected {name}={value!r} to be {before!r}, as when this run began. "
                f"{remedy}"
            )
    if found["batches"] != recorded["batches"]:
        raise InputError(
            f"Expected the batches that this run began with; these are others. {remedy}"
        )


def _check_versions(recorded: Mapping[str, str], found: Mapping[str, str]) -> None:
    others = {name: v for name, v in recorded.items() if found.get(name) != v}
    libc = others.pop("libc", None)
    if others:
        wanted = " ".join(f"{name}=={version}" for name, version in others.items())
        _refuse(f"{wanted}, with which this run began", f"Give `pip install {wanted}`")
    if libc is not None:
        _refuse(
            f"the C library {libc}, with which this run began, not {found['libc']}",
            "Give the same command on such a machine",
        )


def _check_variables(recorded: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name in sorted({*recorded, *found}):
        value = recorded.get(name)
        if value != found.get(name):
            given = f"unset {name}"
            if value is not None:
                given = f"export {name}={shlex.quote(value)}"
            _refuse(
                f"{name} in the environment to be as when this run began",
                f"Give `{given}`",
            )


def _differences(recorded: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Returns the names that differ, with the words that only one of both has."""
    return "; ".join(
        f"{name}: {' '.join(sorted({*then.split()} ^ {*now.split()}))}"
        for name in sorted({*recorded, *found})
        if (then := recorded.get(name, "")) != (now := found.get(name, ""))
    )


def _refuse(expected: str, remedy: str) -> None:
    raise InputError(f"Expected {expected}: {_WHY}. {remedy}, {_OR_ANEW}")
