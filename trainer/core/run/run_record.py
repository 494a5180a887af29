"""The record of what a training run executed, with the manifest of its batches.

    RUN/manifest.json           copy of the manifest of the batches; public
    RUN/run_record.json         what was executed; public
    RUN/certificate.json        copy of the certificate of the batches, if any; public
    RUN/private/run.id          random id of the run
    RUN/private/checkpoints/    see ``checkpoints``
    RUN/private/lock            locked by the process that trains

Epsilon is computed from these two public files, never from flags.

Formal guarantees:
  - ``RunRecord`` holds public values only: nothing in it depends on an example.
  - ``from_json(to_json(record)) == record``; JSON with unknown, missing or ill-typed
    fields, or of another version, is refused.
  - ``read_run`` refuses a record or a manifest that was damaged by accident.  Whoever
    can write the folder can write what they like: no key authenticates it.
  - ``check_execution`` accepts a record only if the run consumed every step of the
    manifest's plan once and in order, or a prefix of the steps.
  - ``open_run`` lets one process at a time write a folder.
  - ``read_or_create_run_id`` gives a folder one id of 128 random bits, on disk before
    it is returned.

Public: records.  Sensitive: the id of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator
from typing import Any

from accounting.core.claim import AUTO_CLIP
from accounting.core.plan import MOST_RUNS, DpSgdPlan, fingerprint
from accounting.core.validation import (
    InputError,
    check_float,
    check_int,
    header,
    installed_version,
    read_fields,
)
from pipelines.core.batches.manifest import Manifest
from pipelines.core.batches.reader import MANIFEST_NAME, PRIVATE_NAME
from pipelines.core.files.local_files import (
    make_private_folder,
    pretty_json,
    read_json,
    write_atomically,
)
from pipelines.core.files.locks import in_use, locked
from trainer.core import claim_names
from trainer.core.claim_names import NON_PRIVATE

#: Bump when the meaning of a field changes or a field is added or removed.
RUN_RECORD_VERSION = 11
_HEADER: Any = {"format_name": "dpsgd-run", "version": RUN_RECORD_VERSION}

RECORD_NAME = "run_record.json"
RUN_ID_NAME = "run.id"
_REMEDY = "Name a folder that `dpsgd train` wrote."
_RUN_ID_BYTES = 16
#: Packages whose version may change rounding or random numbers.
_PACKAGES = (
    "dp-accounting", "numpy", "randomgen", "tensorflow", "tensorflow-privacy", "keras",
)  # fmt: skip


#: Type -> the fields of a record that have no other check.
_KINDS: dict[type, tuple[str, ...]] = {
    bool: ("complete", "batches_used_before"),
    str: ("method", "manifest_fingerprint", "batches_id", "records_id", "key_name"),
    list: ("relies_on",),
    dict: ("method_settings", "optimizer", "model", "versions", "selection"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What was executed.  All fields are public.

    Attributes:
      method: One of ``methods.names()``.
      method_settings: The method's own settings, such as its radius.
      num_steps_executed: Steps consumed, from step 0 on, each once and in order: those
        of the last commit.
      num_commits: Number of commits; see ``checkpoints``.
      complete: Whether these are all steps of the plan.
      noise_multiplier: Noise standard deviation over ``l2_norm_clip``; None without
        noise.
      l2_norm_clip: Bound on the L2 norm of one example's gradient; "auto" if it follows
        a noisy count; None if unclipped.
      clip_quantile: Share of the norms that an automatic clip exceeds; None for a fixed
        one.
      expected_batch_size: The constant that every noisy sum was divided by.
      target_delta: The delta that the run was asked to state epsilon for, or None.
      manifest_fingerprint: ``Manifest.fingerprint`` of the batches.
      batches_id: ``Manifest.batches_id`` of the batches.
      relies_on: Names of the claims by which the run is private, from
        `claim_names.CLAIMS`.
      records_id: ``StoredBatches.records_id`` of the batches, which names every byte of
        their records and reveals nothing about them; empty without a seal.
      key_name: Public name of the key that sampled the batches, whatever their layout.
      optimizer: Name and settings of the optimizer.
      model: Name and sizes of the model, and ``fits``: see ``Session``.
      versions: Name and version of the software that trained.
      selection: For the best of several runs, ``num_runs`` and ``shape`` of the law of
        their number (see `accounting.claims.selection`); empty for other runs.
      batches_used_before: Whether another run may have used the batches: nothing is
        proven for both together.
      of_runs: Number of runs of the plan that were declared together, with this one:
        epsilon is that of all of them.

    Raises:
      InputError: a value is out of range or of another type.
    """

    method: str
    method_settings: dict[str, Any]
    num_steps_executed: int
    complete: bool
    noise_multiplier: float | None
    l2_norm_clip: float | str | None
    expected_batch_size: int
    target_delta: float | None
    manifest_fingerprint: str
    batches_id: str
    optimizer: dict[str, Any]
    model: dict[str, Any]
    versions: dict[str, str]
    clip_quantile: float | None = None
    relies_on: list[str] = dataclasses.field(default_factory=list)
    records_id: str = ""
    key_name: str = ""
    selection: dict[str, Any] = dataclasses.field(default_factory=dict)
    batches_used_before: bool = False
    num_commits: int = 0
    of_runs: int = 1

    def __post_init__(self) -> None:
        check_int("num_steps_executed", self.num_steps_executed, at_least=0)
        check_int("num_commits", self.num_commits, at_least=0)
        check_int("expected_batch_size", self.expected_batch_size, at_least=1)
        check_int("of_runs", self.of_runs, at_least=1, at_most=MOST_RUNS)
        self._check_mechanism()
        if self.target_delta is not None:
            check_float("target_delta", self.target_delta, above=0, below=1)
        for kind, names in _KINDS.items():
            for name in names:
                if not isinstance(getattr(self, name), kind):
                    raise InputError(f"Expected {name} to be of type {kind.__name__}.")
        claim_names.check(map(str, self.relies_on))

    def _check_mechanism(self) -> None:
        if self.method == NON_PRIVATE:
            if (self.noise_multiplier, self.l2_norm_clip) != (None, None):
                raise InputError(
                    "Expected noise_multiplier and l2_norm_clip to be None for "
                    "method='non-private'."
                )
            return
        # None is refused by name, like any other value that is not a number.
        check_float("noise_multiplier", self.noise_multiplier, at_least=0)  # type: ignore[arg-type]
        if self.l2_norm_clip == AUTO_CLIP:
            check_float("clip_quantile", self.clip_quantile, at_least=0.5, below=1)  # type: ignore[arg-type]
        else:
            check_float("l2_norm_clip", self.l2_norm_clip, above=0)  # type: ignore[arg-type]

    @property
    def fits(self) -> list[dict[str, Any]]:
        """The calls of ``fit``; `dpsgd train` makes one."""
        found: list[dict[str, Any]] = self.model.get("fits", [])
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, with ``format`` and ``version``."""
        fields = {**header(**_HEADER), **dataclasses.asdict(self)}
        return {**fields, "checksum": fingerprint(fields)}

    @classmethod
    def from_json(cls, fields: Any) -> RunRecord:
        """Returns the record that ``to_json`` wrote.

        Raises:
          InputError: there are unknown or missing fields, ill-typed values, another
            version, or other values than the checksum's.
        """
        names = [*(field.name for field in dataclasses.fields(cls)), "checksum"]
        found = read_fields(fields, names, kind="run record", **_HEADER)
        checksum = found.pop("checksum")
        if checksum != fingerprint({**header(**_HEADER), **found}):
            raise InputError(
                f"Expected checksum={checksum!r} to be that of the run record; its "
                "values have changed since. Restore it, or train again."
            )
        return cls(**found)


def versions() -> dict[str, str]:
    """Returns name and version of the software that trains.

    TF Privacy is optional: it declares Python 3.11 or earlier.
    """
    return {name: installed_version(name) for name in _PACKAGES}


def read_run(run: str | os.PathLike[str]) -> tuple[RunRecord, Manifest]:
    """Returns record and manifest of a run.

    Args:
      run: A folder that ``dpsgd train`` or ``make_private`` wrote.

    Raises:
      InputError: a file is missing or damaged, or they are of different runs.
    """
    root = pathlib.Path(run)
    record = RunRecord.from_json(read_json(root / RECORD_NAME, remedy=_REMEDY))
    manifest = Manifest.from_json(read_json(root / MANIFEST_NAME, remedy=_REMEDY))
    _check_manifest(record, manifest)
    return record, manifest


def _check_manifest(record: RunRecord, manifest: Manifest) -> None:
    for name in ("manifest_fingerprint", "batches_id"):
        expected = getattr(manifest, name.removeprefix("manifest_"))
        if getattr(record, name) != expected:
            raise InputError(
                f"Expected {name}={getattr(record, name)} of the run record to be "
                f"{expected}, that of the manifest. The run used other batches."
            )


def check_execution(
    record: RunRecord, manifest: Manifest, *, allow_stopped: bool = False
) -> None:
    """Refuses a record that did not execute exactly the plan of ``manifest``.

    Args:
      record: Record of the run.
      manifest: Manifest of the batches.
      allow_stopped: Whether to accept a run of the first steps of the plan.

    Raises:
      InputError: the run used other batches, fewer or more steps, or another divisor.
    """
    plan: DpSgdPlan = manifest.plan
    _check_manifest(record, manifest)
    is_whole = record.num_steps_executed == plan.num_steps and record.complete
    is_prefix = record.num_steps_executed <= plan.num_steps and not record.complete
    if not (is_whole or (allow_stopped and is_prefix)):
        raise InputError(
            f"Expected num_steps_executed={record.num_steps_executed} to be the plan's "
            f"num_steps={plan.num_steps}, and the run to be complete. Train to the end."
        )
    if record.expected_batch_size != plan.expected_batch_size:
        raise InputError(
            f"Expected expected_batch_size={record.expected_batch_size} of the run "
            f"record to be the plan's {plan.expected_batch_size}."
        )


def write_run(
    run: str | os.PathLike[str], record: RunRecord, manifest: Manifest
) -> None:
    """Writes record and manifest copy into a folder.

    Args:
      run: Folder of the run.
      record: Record of the run.
      manifest: Manifest of the batches.
    """
    root = pathlib.Path(run)
    for name, part in ((MANIFEST_NAME, manifest), (RECORD_NAME, record)):
        write_atomically(root / name, pretty_json(part.to_json()))


@contextlib.contextmanager
def open_run(run: pathlib.Path, *, resumes: bool = False) -> Iterator[None]:
    """Makes the folder of a run, or cleans an existing one.

    Other processes are refused until the context or this process ends.

    Args:
      run: The folder.
      resumes: Whether the run is resumed.

    Raises:
      InputError: another process runs in the folder, or it has begun or finished a run
        there since the folder was checked.
    """
    private = run / PRIVATE_NAME
    run.mkdir(parents=True, exist_ok=True)
    make_private_folder(private)
    with locked(private, run):
        is_begun, path = (private / RUN_ID_NAME).exists(), run / RECORD_NAME
        if (is_begun and not resumes) or (
            path.exists() and read_json(path)["complete"]
        ):
            raise in_use(run)
        _remove_leftovers(run)
        yield


def _remove_leftovers(run: pathlib.Path) -> None:
    """Removes unfinished files of a killed run, whose names start with a dot."""
    folders = run, run / PRIVATE_NAME, *run.glob(f"{PRIVATE_NAME}/*/"), *run.glob("*/")
    for path in {each for folder in folders for each in folder.glob(".*")}:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def read_or_create_run_id(run: pathlib.Path) -> str:
    """Returns the random id of the run in the folder ``run``.

    Raises:
      InputError: the file does not hold an id.
    """
    path = run / PRIVATE_NAME / RUN_ID_NAME
    if not path.exists():
        # A run that was killed before this point has drawn nothing.
        new = secrets.token_hex(_RUN_ID_BYTES).encode() + b"\n"
        write_atomically(path, new, mode=0o600)
    return read_run_id(run)


def read_run_id(run: pathlib.Path) -> str:
    """Returns the random id of the run in the folder ``run``; empty without one.

    Raises:
      InputError: the file does not hold an id.
    """
    path = run / PRIVATE_NAME / RUN_ID_NAME
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return ""
    if not re.fullmatch(rb"[0-9a-f]{%d}\n" % (2 * _RUN_ID_BYTES), found):
        raise InputError(
            f"Expected {path} to hold the id of the run; it was changed. Restore it, "
            "or start again in an empty --out folder."
        )
    return found.decode().strip()
