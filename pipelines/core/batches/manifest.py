"""The manifest of a folder of batches, its checksums and its certificate.

    OUT/manifest.json             plan, columns, physical batch size, files; public
    OUT/batches-*.tfrecord        the batches; sensitive
    OUT/private/checksums.json    digests of all records and of the input's files, and
                                  the key of their seal; sensitive
    OUT/certificate.json          that the batches are what plan, key and input
                                  determine; public, and in the folder of a run

``pipelines.batches.folder`` reads and writes these files.

*The manifest* holds public values only: nothing in it depends on which example was
sampled when, and the files it names depend on plan and columns alone.  Its
``batches_id`` commits to the sampling key, so that batches of one plan but of different
keys have different manifests.  Columns whose records no reader could read are refused.

*The checksums* have the digest of every record, and of the files that the examples are
from.  `Checksums.of` refuses an edited manifest.  The seal changes with the manifest or
any record.  Seal and digest of the seal reveal nothing about the records, up to the PRF
assumption on keyed BLAKE2b, and nobody can make the seal from public files.

*The certificate* is written by `dpsgd verify --resample`, if the records are byte for
byte those of the reference sampler (``pipelines.core.resample``, which says what that
proves, and under which assumptions).  A run that trains on the batches copies it, and
checks every record against the digests that the seal is made of.  The certificate holds
the manifest's fingerprint, the seal, and versions of software: neither key, records nor
sizes.  `Certificate.is_about` accepts it only for the manifest and the records that
were certified, up to collisions of SHA-256 and of keyed BLAKE2b.  Without ``private/``
of the batches, or their key, nobody can make a certificate that `is_about` accepts.

A certificate is no signature: whoever may read the private folder of the batches could
write one without certifying.  Whoever doubts it runs the command again.

Public: manifest and certificate.  Sensitive: checksums, since the number of parts of a
step may depend on the examples.

References:
  The largest message: protobuf.dev/programming-guides/proto-limits, 2 GiB.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.plan import DpSgdPlan, fingerprint
from accounting.core.validation import (
    InputError,
    check_choice,
    check_int,
    header,
    installed_version,
    read_fields,
)
from pipelines.core.keys import KEY_BYTES, derive

DTYPES = (
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
RESERVED_NAMES = ("weight", "step", "part")

#: The longest message that a reader of protocol buffers accepts.
MOST_RECORD_BYTES = (1 << 31) - 1
#: Upper bounds on the tags and lengths of a feature (six of at most 6 bytes), and on
#: the features step and part.
_FEATURE_BYTES, _STEP_BYTES = 40, 80
_WEIGHT_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """Name, NumPy type and per-example shape of one column.  All public.

    Raises:
      InputError: a dtype that is not in ``DTYPES``, a reserved name, or an example that
        is longer than a record.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice(f"dtype of column {self.name}", self.dtype, DTYPES)
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.name in RESERVED_NAMES:
            raise InputError(
                f"Expected column name={self.name!r} not to be one of "
                f"{', '.join(RESERVED_NAMES)}. Rename the column."
            )
        size = np.dtype(self.dtype).itemsize * math.prod(self.shape)
        if size > MOST_RECORD_BYTES:
            raise InputError(
                f"Expected column {self.name} to hold at most {MOST_RECORD_BYTES} "
                f"bytes in a row; it holds {size}. Split it, or drop it."
            )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian dtype of one example, a sub-array dtype if it has a shape."""
        scalar = np.dtype(self.dtype).newbyteorder("<")
        return np.dtype((scalar, self.shape)) if self.shape else scalar

    @property
    def num_bytes(self) -> int:
        """Bytes of one example."""
        return self.numpy_dtype.itemsize


def row_bytes(columns: Sequence[Column]) -> int:
    """Returns the bytes of one row of ``columns``."""
    return sum(column.num_bytes for column in columns)


def record_bytes(columns: Sequence[Column], physical_batch_size: int) -> int:
    """Returns a tight upper bound on the bytes of a record.

    Args:
      columns: Columns of the record.
      physical_batch_size: Number of rows of the record, real and padding.
    """
    names = [*(column.name for column in columns), "weight"]
    framing = sum(len(name.encode()) + _FEATURE_BYTES for name in names) + _STEP_BYTES
    return physical_batch_size * (row_bytes(columns) + _WEIGHT_BYTES) + framing


def check_record(columns: Sequence[Column], physical_batch_size: int) -> None:
    """Refuses records that are too long to be read.

    Args:
      columns: Columns of the record.
      physical_batch_size: Number of rows of the record, real and padding.

    Raises:
      InputError: a record would be too long; the message has the largest size that
        fits.
    """
    size = record_bytes(columns, physical_batch_size)
    if size <= MOST_RECORD_BYTES:
        return
    row = row_bytes(columns) + _WEIGHT_BYTES
    most = (MOST_RECORD_BYTES - record_bytes(columns, 0)) // row
    if most < 1:
        raise InputError(
            f"Expected one row, of {row} bytes, to fit into a record of at most "
            f"{MOST_RECORD_BYTES}. Drop or split columns."
        )
    raise InputError(
        f"Expected physical_batch_size={physical_batch_size} to make records of at "
        f"most {MOST_RECORD_BYTES} bytes, which can be read; at {row} bytes a row they "
        f"have {size}. Make the batches with --physical-batch-size {most} or less."
    )


#: Raise it when a reader of the old version would misread the new one, or when the same
#: key and input would give other batches.
FORMAT_VERSION = 2

_HEADER: Any = {"format_name": "dpsgd-batches", "version": FORMAT_VERSION}


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
          InputError: the fields are no manifest, of another version, or inconsistent.
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
    """The checksums of one batch file.  Sensitive: they depend on the examples.

    Attributes:
      num_real: Number of real rows in the file.
      records: Checksum of each record, in order.
    """

    num_real: int
    records: tuple[RecordChecksum, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(record.size for record in self.records)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        return {"num_real": self.num_real, "records": list(map(str, self.records))}

    @classmethod
    def from_json(cls, fields: Any) -> FileChecksum:
        """Returns the checksum that ``to_json`` wrote.

        Raises:
          TypeError: the fields are no checksum.
          ValueError: the checksum of a record is malformed.
        """
        records = tuple(map(parse_record_checksum, fields["records"]))
        return cls(**{**fields, "records": records})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checksums:
    """The digests of all that a job wrote and read.  Sensitive.

    Attributes:
      manifest_sha256: SHA-256 of the bytes of the manifest.
      files: Name of a batch file -> its checksums.
      inputs: Digest of each file of the input, sorted.
      seal_key: Hex digits of the secret key of ``seal``.
      key_sha256: SHA-256 of the key file beside the batches; empty if there was none.
      table: Fields of the `SourceTable` of the examples; empty of earlier releases.
    """

    manifest_sha256: str
    files: Mapping[str, FileChecksum]
    inputs: tuple[str, ...]
    seal_key: str
    key_sha256: str
    table: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        files = {name: sums.to_json() for name, sums in self.files.items()}
        return {**vars(self), "files": files, "inputs": list(self.inputs)}

    @classmethod
    def of(cls, manifest: bytes, fields: Any) -> Checksums:
        """Returns the checksums that ``to_json`` wrote.

        Args:
          manifest: Bytes of the manifest in the same folder.
          fields: What ``to_json`` returned.

        Raises:
          InputError: the fields are damaged, or the manifest was edited.
        """
        try:
            files = fields["files"].items()
            sums = {name: FileChecksum.from_json(each) for name, each in files}
            inputs = tuple(fields["inputs"])
            found = cls(**{**fields, "files": sums, "inputs": inputs})
            if len(bytes.fromhex(found.seal_key)) != KEY_BYTES:
                raise ValueError("without its key, anybody could make the seal")
        except (KeyError, TypeError, AttributeError, ValueError):
            raise InputError(
                "Expected private/checksums.json to hold checksums and digests of the "
                "input's files. Restore it, or make the batches again."
            ) from None
        if found.manifest_sha256 != hashlib.sha256(manifest).hexdigest():
            raise InputError(
                "Expected the manifest to be as it was written; it was edited. Restore "
                "it, or make the batches again."
            )
        return found

    @property
    def seal(self) -> bytes:
        """Seal of the manifest and of the digests of all records.

        It is secret until a certificate shows it; its SHA-256 is public.
        """
        digest = fingerprint(self.to_json()["files"])
        key = bytes.fromhex(self.seal_key)
        return derive(key, "seal", self.manifest_sha256, digest)

    def of_file(self, file: BatchFile) -> FileChecksum:
        """Returns the checksums of a file of the manifest.

        Raises:
          InputError: there are none.
        """
        if file.name not in self.files:
            raise InputError(f"Expected a checksum for batch file {file.name}.")
        return self.files[file.name]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordChecksum:
    """The checksum of one record.  Sensitive.

    Attributes:
      step: Step of its physical batch.
      part: Index of the physical batch within the step, from 0.
      size: Bytes of the record and its frame.
      sha256: SHA-256 of these bytes, as hex digits.

    Example:
      >>> str(RecordChecksum(step=7, part=2, size=16, sha256="0" * 64))[:10]
      '7 2 16 000'
    """

    step: int
    part: int
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.step} {self.part} {self.size} {self.sha256}"


_TEXT = re.compile(r"(\d{1,18}) (\d{1,18}) (\d{1,18}) ([0-9a-f]{64})")


def parse_record_checksum(text: str) -> RecordChecksum:
    """Returns the checksum that ``str`` wrote.

    Raises:
      ValueError: ``str`` wrote no such text.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError("Expected step, part, size and SHA-256 of a record.")
    step, part, size = map(int, found.groups()[:3])
    return RecordChecksum(step=step, part=part, size=size, sha256=found[4])


_OF_CERTIFICATE: Any = {"format_name": "dpsgd-certificate", "version": 1}
#: What the reference sampler relies on.
_PACKAGES = ("dpsgd", "numpy", "pyarrow", "cryptography", "google-crc32c")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was certified, and by which software.

    Attributes:
      manifest_fingerprint: ``Manifest.fingerprint`` of the batches.
      seal: ``Checksums.seal`` of the batches, as hex digits.
      versions: Name and version of the software that certified.
    """

    manifest_fingerprint: str
    seal: str
    versions: dict[str, str]

    def __post_init__(self) -> None:
        if not all(isinstance(s, str) for s in (self.manifest_fingerprint, self.seal)):
            raise InputError("Expected the fields of a certificate to be texts.")

    @classmethod
    def of(cls, manifest: Manifest, checksums: Checksums) -> Certificate:
        """Returns the certificate of batches.

        Args:
          manifest: Manifest of the batches.
          checksums: Checksums of the batches, which must equal the reference's.
        """
        return cls(
            manifest_fingerprint=manifest.fingerprint,
            seal=checksums.seal.hex(),
            versions={name: installed_version(name) for name in _PACKAGES},
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, with ``format`` and ``version``."""
        return {**header(**_OF_CERTIFICATE), **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, fields: Any) -> Certificate:
        """Returns the certificate that ``to_json`` wrote.

        Raises:
          InputError: the fields are no certificate.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        remedy = "Remove it, or run `dpsgd verify --resample` again."
        found = read_fields(
            fields, names, kind="certificate", remedy=remedy, **_OF_CERTIFICATE
        )
        return cls(**found)

    def is_about(self, manifest_fingerprint: str, records_id: str) -> bool:
        """Whether it certifies the records of a run.

        Args:
          manifest_fingerprint: Fingerprint of the manifest.
          records_id: ``digest_of_seal`` of the batches.
        """
        return (
            self.manifest_fingerprint == manifest_fingerprint
            and digest_of_seal(self.seal) == records_id
        )


def digest_of_seal(seal: str) -> str:
    """Returns a public name of what was sealed: the SHA-256 of the seal's digits."""
    return hashlib.sha256(seal.encode()).hexdigest()
