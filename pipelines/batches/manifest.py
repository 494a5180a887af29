"""The manifest of a folder of batches (public), and its checksums (sensitive).

    OUT/manifest.json             plan, columns, physical batch size, files; public
    OUT/batches-*.tfrecord        the batches; sensitive
    OUT/private/checksums.json    size and real rows of every file, digests of its
                                  records and of the input's files, and the key of
                                  their seal; sensitive
    OUT/certificate.json          see ``certificate``; public
    OUT/private/sampling.key      the key, unless it is kept elsewhere; sensitive

Formal guarantees:
  - ``Manifest`` holds public values only: nothing in it depends on which example was
    sampled when, and the files it names depend on plan and columns alone.
  - ``batches_id`` commits to the sampling key: batches of one plan but of different
    keys have different manifests.
  - An edited manifest does not match the digest in the checksums.
  - ``read_input_digests`` identifies the files that the examples are from.
  - ``read_seal`` changes with the manifest or any record.  It and its digest reveal
    nothing about them, up to the PRF assumption on keyed BLAKE2b; nobody makes it from
    public files.
  - Files appear under their final name complete or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection
from typing import Any

from accounting.plan import DpSgdPlan, fingerprint
from accounting.validation import InputError, check_int
from accounting.versioned_json import header, read_fields
from pipelines.batches.columns import Column, check_record
from pipelines.core.keys import derive
from pipelines.files.paths import StrPath, join
from pipelines.files.storage import make_folder, read_bytes, write_atomically

#: Raise it when a reader of the old version would misread the new one, or when the same
#: key and input would give other batches.
FORMAT_VERSION = 2

MANIFEST_NAME = "manifest.json"
_HEADER: Any = {"format_name": "dpsgd-batches", "version": FORMAT_VERSION}
PRIVATE_NAME = "private"
CHECKSUMS_NAME = "checksums.json"
KEY_NAME = "sampling.key"

#: Key of the Parquet schema metadata with the description of a data set: a JSON object
#: of public values.
DATASET_METADATA_KEY = b"dpsgd.dataset"
#: The record that `dpsgd prepare` writes beside the folders of its splits.
PREPARED_NAME = "_prepared.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchFile:
    """A file of batches and its contiguous range of steps."""

    name: str
    first_step: int
    num_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a folder of batches.  All fields are public.

    Attributes:
      plan: How the batches were sampled.
      columns: Columns of every record, in the order of the packed row.
      physical_batch_size: Number of rows of every record, real and padding.
      batches_id: Commitment to the sampling key and the input's blocks, 32 hex digits.
      dataset: Description of the input from its Parquet metadata (see
        ``DATASET_METADATA_KEY``), such as the number of buckets of a hashed column.
      files: Files in step order, which hold every step of the plan exactly once.

    Raises:
      InputError: files that do not hold every step once, a physical batch size below 1,
        or records that are too long to be read.
    """

    plan: DpSgdPlan
    columns: tuple[Column, ...]
    physical_batch_size: int
    batches_id: str
    files: tuple[BatchFile, ...]
    dataset: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_int("physical_batch_size", self.physical_batch_size, at_least=1)
        check_record(self.columns, self.physical_batch_size)
        next_step = 0
        for file in self.files:
            _check_name(file.name)
            if file.first_step != next_step or file.num_steps < 1:
                raise InputError(
                    f"Expected file {file.name} to start at step {next_step}."
                )
            next_step += file.num_steps
        if next_step != self.plan.num_steps:
            raise InputError(
                f"Expected files for num_steps={self.plan.num_steps}; they hold "
                f"{next_step}."
            )

    @property
    def parts_per_step(self) -> int | None:
        """Number of records of every step; None if it depends on the data."""
        largest = self.plan.largest_batch_size
        return None if largest is None else -(-largest // self.physical_batch_size)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of this manifest, 64 hexadecimal digits."""
        return fingerprint(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, with ``format`` and ``version``."""
        return {
            **header(**_HEADER),
            "plan": self.plan.to_json(),
            "columns": [
                {**dataclasses.asdict(column), "shape": list(column.shape)}
                for column in self.columns
            ],
            "physical_batch_size": self.physical_batch_size,
            "batches_id": self.batches_id,
            "dataset": self.dataset,
            "files": [dataclasses.asdict(file) for file in self.files],
        }

    @classmethod
    def from_json(cls, fields: Any) -> Manifest:
        """Returns the manifest that ``to_json`` wrote.

        Raises:
          InputError: not a manifest, another version, or inconsistent.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        found = read_fields(
            fields,
            names,
            kind="manifest",
            remedy="Use the release that wrote it, or make the batches again with "
            "`dpsgd batches`.",
            **_HEADER,
        )
        try:
            found["plan"] = DpSgdPlan.from_json(found["plan"])
            found["columns"] = tuple(Column(**column) for column in found["columns"])
            found["files"] = tuple(BatchFile(**file) for file in found["files"])
            manifest = cls(**found)
        except (TypeError, AttributeError):
            raise InputError(
                "Expected a complete manifest; a field is missing or of another type. "
                "Restore it, or make the batches again."
            ) from None
        if manifest.to_json() != fields:
            raise InputError("Expected no unknown fields in the manifest.")
        return manifest


def _check_name(name: str) -> None:
    """Refuses a name that would lead out of the folder of the batches."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name):
        raise InputError(
            "Expected the manifest to name batch files without folders; it was edited. "
            "Restore it, or make the batches again."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileChecksum:
    """The checksum of one batch file.  Sensitive: it depends on the examples.

    Attributes:
      size: Bytes of the file.
      num_records: Number of records in the file.
      num_real: Number of real rows in the file.
      records: Checksum of each record in order, as text (``record_checksums``); empty
        for files of earlier versions.
      sha256: SHA-256 of a file without ``records``, as hex digits; otherwise empty:
        hashing every byte twice would cost a twentieth of the job.
    """

    size: int
    num_records: int
    num_real: int
    records: tuple[str, ...] = ()
    sha256: str = ""

    @classmethod
    def from_json(cls, fields: Any) -> FileChecksum:
        """Returns the checksum whose ``dataclasses.asdict`` is ``fields``."""
        return cls(**{**fields, "records": tuple(fields.get("records", ()))})


def pretty_json(value: Any) -> bytes:
    """Returns ``value`` as indented JSON with sorted keys."""
    return (
        json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    ).encode()


def read_json(path: StrPath, *, remedy: str = "") -> Any:
    """Returns the JSON value in a file.

    Args:
      path: Path of the file.
      remedy: What the user can do if it is missing.

    Raises:
      InputError: no such file, or not JSON.
    """
    try:
        return json.loads(read_bytes(path))
    except FileNotFoundError:
        raise InputError(f"Expected {path} to exist. {remedy}".strip()) from None
    except OSError as error:
        raise InputError(
            f"Expected {path} to be readable: {error.strerror or type(error).__name__}."
            " Restore access to it, then give the same command again."
        ) from None
    except ValueError as error:
        raise InputError(
            f"Expected {path} to be a JSON file: {type(error).__name__}."
        ) from None


def read_manifest(directory: StrPath) -> Manifest:
    """Returns the manifest of a folder of batches.

    Raises:
      InputError: missing, unfinished or damaged.
    """
    path = join(directory, MANIFEST_NAME)
    remedy = "The folder holds no finished batches; run `dpsgd batches` to the end."
    return Manifest.from_json(read_json(path, remedy=remedy))


def write_manifest(
    directory: StrPath,
    manifest: Manifest,
    checksums: dict[str, FileChecksum],
    input_digests: Collection[str] = (),
    seal_key: str = "",
) -> None:
    """Writes the checksums, then the manifest, whose presence means a finished job.

    Args:
      directory: Folder of the batches.
      manifest: Description of the batches.
      checksums: Name of a batch file -> its checksum.
      input_digests: ``parquet_blocks.footer_digest`` of each file of the input.
      seal_key: Hex digits of the secret key of ``read_seal``; empty for no seal.
    """
    data = pretty_json(manifest.to_json())
    private = {
        "manifest_sha256": hashlib.sha256(data).hexdigest(),
        "files": {name: dataclasses.asdict(sums) for name, sums in checksums.items()},
        "inputs": sorted(set(input_digests)),
        "seal_key": seal_key,
    }
    if digest := digest_of_key(directory):
        private["key_sha256"] = digest
    make_folder(join(directory, PRIVATE_NAME))
    path = join(directory, PRIVATE_NAME, CHECKSUMS_NAME)
    write_atomically(path, pretty_json(private), mode=0o600)
    write_atomically(join(directory, MANIFEST_NAME), data)


def digest_of_key(directory: StrPath) -> str:
    """Returns the SHA-256 of the key file of a folder; empty if it holds none.

    It is kept beside the key, which is uniform: it tells nothing that the key does not.
    """
    try:
        data = read_bytes(join(directory, PRIVATE_NAME, KEY_NAME))
    except FileNotFoundError:
        return ""
    return hashlib.sha256(data).hexdigest()


def is_same_key(directory: StrPath) -> bool:
    """Whether the key file of a folder is the one that its batches were sampled with.

    So it counts if the key was moved elsewhere, or an earlier release made the batches.

    Raises:
      InputError: as ``read_checksums``.
    """
    private, _ = _read_private(directory)
    known, found = private.get("key_sha256"), digest_of_key(directory)
    return not known or not found or known == found


def read_checksums(directory: StrPath) -> dict[str, FileChecksum]:
    """Returns the checksums of a folder, after checking its manifest against them.

    Raises:
      InputError: missing or damaged, or the manifest was edited.
    """
    private, refusal = _read_private(directory)
    try:
        files = private["files"].items()
        return {name: FileChecksum.from_json(sums) for name, sums in files}
    except (KeyError, TypeError, AttributeError):
        raise refusal from None


def read_input_digests(directory: StrPath) -> frozenset[str]:
    """Returns the digests of the files that the examples are from.  Sensitive.

    Raises:
      InputError: as ``read_checksums``, or they were not recorded.
    """
    private, refusal = _read_private(directory)
    try:
        return frozenset(private["inputs"])
    except (KeyError, TypeError):
        raise refusal from None


def read_seal(directory: StrPath) -> bytes:
    """Returns the seal of the manifest and of the digests of all records; else empty.

    It is secret until a certificate shows it; its SHA-256 is public.  Batches of
    earlier releases have none.

    Raises:
      InputError: as ``read_checksums``.
    """
    private, refusal = _read_private(directory)
    try:
        key, named = bytes.fromhex(private.get("seal_key", "")), private["files"]
    except (KeyError, TypeError, ValueError):
        raise refusal from None
    labels = ("seal", private["manifest_sha256"], fingerprint(named))
    return derive(key, *labels) if key else b""


def _read_private(directory: StrPath) -> tuple[Any, InputError]:
    """Returns the contents of checksums.json, and the error if they are incomplete."""
    path = join(directory, PRIVATE_NAME, CHECKSUMS_NAME)
    manifest = join(directory, MANIFEST_NAME)
    private = read_json(path, remedy="Without it the batches cannot be verified.")
    refusal = InputError(
        f"Expected {path} to hold checksums and digests of the input's files. Restore "
        "it, or make the batches again."
    )
    try:
        data = read_bytes(manifest)
    except OSError:
        raise InputError(f"Expected {manifest} to exist.") from None
    if not isinstance(private, dict) or "manifest_sha256" not in private:
        raise refusal
    if private["manifest_sha256"] != hashlib.sha256(data).hexdigest():
        raise InputError(
            f"Expected {manifest} to be as it was written; it was edited. Restore it, "
            "or make the batches again."
        )
    return private, refusal
