"""What a run began under: settings, data, code and machine.

    RUN/private/origin.json

A step that a run repeats after a kill gets the noise that it had.  If a single bit of
its sum were another, the difference of the two releases would be free of noise.  So a
run goes on only where each of these is what it was:

    settings    of the request
    batches     their manifest and their bytes
    release     the source of this project
    versions    of TensorFlow and all else that computes, with the C library
    variables   of the environment that TensorFlow and oneDNN read
    processor   its kind, instructions and caches, by which kernels are chosen
    devices     names of the accelerators
    threads     of TensorFlow, which split its sums; restored when a run goes on
    code        the files of the user's functions and layers, and what they import
    step        what the traced step computes, whatever its code reads elsewhere

Formal guarantees:
  - A run whose origin differs in any of these is refused, in one line that says which.
  - All of it enters the key of the run: under an edited record the checkpoint is
    refused, and the noise is other noise.
  - A run that goes on with fewer or more cores uses the threads that it began with.

Not covered: entries of lookup tables of one's own, what a ``tf.py_function`` reads from
files, and packages that are installed beside those named above, unless the traced step
shows it.

Public: all but the digest of the batches, which commits to the examples: the file stays
in ``private``.
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
from collections.abc import Mapping
from typing import Any

from accounting.plan import fingerprint
from accounting.validation import InputError
from pipelines.batches.manifest import (
    PRIVATE_NAME,
    pretty_json,
    read_json,
    write_atomically,
)
from trainer.run import run_record, user_sources
from trainer.run.checkpoints import CHECKPOINT_NAME

ORIGIN_NAME = "origin.json"

Origin = dict[str, Any]

_OR_ANEW = "or start again in an empty --out folder."
_WHY = "a repeated step would be a second release under the same noise"
_PARTS = {
    "settings", "batches", "release", "versions", "variables", "processor", "devices",
    "threads", "code", "step",
}  # fmt: skip
#: Of the environment: what these begin, TensorFlow, oneDNN and XLA look at.
_VARIABLES = ("TF_", "ONEDNN_", "DNNL_", "XLA_", "CUBLAS_", "NVIDIA_TF32_")
#: Log levels, Keras's version, which is fixed, and what ``threads`` holds.
_HARMLESS = ("TF_CPP_", "TF_USE_LEGACY_KERAS", "TF_NUM_INT")
#: Of Linux's list of what a processor can do: sets of instructions that compute.
_COMPUTES = re.compile(r"sse|avx|fma|amx|f16c|bmi|sve|sme|asimd|fp|bf16|i8mm|dot")
_PROCESSOR = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


def here(settings: Any, *batches: str) -> Origin:
    """Returns what of the origin is known before TensorFlow is loaded.

    Args:
      settings: Of the request; a dataclass.
      batches: What tells batches apart.  Sensitive.
    """
    return {
        # As JSON gives them back.
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "batches": fingerprint(batches),
        "release": _release(),
        "versions": _versions(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.startswith(_HARMLESS)
        },
        "processor": _processor(),
    }


@functools.cache
def _release() -> str:
    sources = hashlib.sha256()
    root = pathlib.Path(__file__).parents[2]
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
    # Of the C library are the exponentials of the tails of normal noise.
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
    # Products of matrices are cut into blocks that fit them.
    found = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return {f"cache {path.parent.name}": path.read_text().strip() for path in found}


def _path(run: pathlib.Path) -> pathlib.Path:
    return run / PRIVATE_NAME / ORIGIN_NAME


def read(run: pathlib.Path) -> Origin | None:
    """Returns what a run began under; None if it drew no noise yet.

    Raises:
      InputError: it did draw noise, and does not say; or it says it in another form.
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
    """Writes what a run begins under, before it draws any noise.

    Args:
      run: The folder of the run.
      origin: All parts.
    """
    write_atomically(_path(run), pretty_json(origin), mode=0o600)


def check_here(recorded: Origin, found: Origin) -> None:
    """Accepts a run that began with what is found here.

    Args:
      recorded: What the run began under.
      found: From ``here``.

    Raises:
      InputError: settings, batches, code, software, environment or processor are
        others.
    """
    _check_request(recorded, found)
    edited = edited_files(recorded)
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


def edited_files(recorded: Origin) -> list[str]:
    """Returns the files of the user's code that are not as when the run began."""
    names = user_sources.changed(recorded["code"])
    return [user_sources.file_of(name) or name for name in names]


def check_traced(recorded: Origin, found: Origin) -> None:
    """Accepts a run whose step and devices are what they were when the run began.

    Args:
      recorded: What the run began under.
      found: All parts, as they are now.

    Raises:
      InputError: the step computes something else, or elsewhere.
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
    if found["step"] != recorded["step"]:
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
    """Names what differs, and of lists of words those that only one has."""
    return "; ".join(
        f"{name}: {' '.join(sorted({*then.split()} ^ {*now.split()}))}"
        for name in sorted({*recorded, *found})
        if (then := recorded.get(name, "")) != (now := found.get(name, ""))
    )


def _refuse(expected: str, remedy: str) -> None:
    raise InputError(f"Expected {expected}: {_WHY}. {remedy}, {_OR_ANEW}")
