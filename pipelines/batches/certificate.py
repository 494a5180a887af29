"""The certificate that batches are what their plan, key and input determine.

    OUT/certificate.json     beside the batches, and in the folder of a run; public

`dpsgd verify --resample` writes it, if the records are byte for byte those of the
reference sampler (``pipelines.core.resample``, which says what that proves, and under
which assumptions).  A run that trains on the batches copies it, and checks every record
against the digests that the seal is made of.

Formal guarantees:
  - nothing sensitive: its fields are the manifest's fingerprint, the seal, and versions
    of software.  The seal is the output of a keyed hash: it reveals neither key,
    records nor sizes.
  - of these records: ``is_about`` accepts it only for the manifest and the records that
    were certified, up to collisions of SHA-256 and of keyed BLAKE2b.
  - not from public files: without ``private/`` of the batches, or their key, nobody can
    make one that ``is_about`` accepts.

It is no signature: who may read the private folder of the batches could write one
without certifying.  Who doubts it runs the command again.

Public: all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from accounting.validation import InputError
from accounting.versioned_json import header, installed_version, read_fields
from pipelines.batches.manifest import Manifest, pretty_json, read_json, read_seal
from pipelines.files import storage
from pipelines.files.paths import StrPath, join

CERTIFICATE_NAME = "certificate.json"
_HEADER: Any = {"format_name": "dpsgd-certificate", "version": 1}
#: What the reference sampler relies on.
_PACKAGES = ("dpsgd", "numpy", "pyarrow", "cryptography", "google-crc32c")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was certified, and by which software.

    Attributes:
      manifest_fingerprint: ``Manifest.fingerprint`` of the batches.
      seal: ``read_seal`` of the batches, as hex digits.
      versions: Name and version of the software that certified.
    """

    manifest_fingerprint: str
    seal: str
    versions: dict[str, str]

    def __post_init__(self) -> None:
        if not all(isinstance(s, str) for s in (self.manifest_fingerprint, self.seal)):
            raise InputError("Expected the fields of a certificate to be texts.")

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, with ``format`` and ``version``."""
        return {**header(**_HEADER), **dataclasses.asdict(self)}

    def is_about(self, manifest_fingerprint: str, records_id: str) -> bool:
        """Whether it certifies the records of a run.

        Args:
          manifest_fingerprint: That of the manifest.
          records_id: From ``records_id`` of the batches.
        """
        return (
            self.manifest_fingerprint == manifest_fingerprint
            and bool(self.seal)
            and _digest(self.seal) == records_id
        )


def _digest(seal: str) -> str:
    return hashlib.sha256(seal.encode()).hexdigest()


def records_id(directory: StrPath) -> str:
    """Returns a public name of the manifest and all records; empty without a seal.

    It is the SHA-256 of the seal, which a certificate shows.

    Args:
      directory: Folder of batches.

    Raises:
      InputError: as ``read_checksums``.
    """
    seal = read_seal(directory).hex()
    return _digest(seal) if seal else ""


def write_certificate(directory: StrPath, manifest: Manifest, seal: bytes) -> None:
    """Writes the certificate of batches that were compared with the reference.

    Args:
      directory: Folder of the batches.
      manifest: Their manifest.
      seal: ``read_seal`` of the checksums that were compared.
    """
    certificate = Certificate(
        manifest_fingerprint=manifest.fingerprint,
        seal=seal.hex(),
        versions={name: installed_version(name) for name in _PACKAGES},
    )
    data = pretty_json(certificate.to_json())
    storage.write_atomically(join(directory, CERTIFICATE_NAME), data)


def read_certificate(directory: StrPath) -> Certificate | None:
    """Returns the certificate in a folder of batches or of a run; None without one.

    Raises:
      InputError: unreadable, or not a certificate.
    """
    path = join(directory, CERTIFICATE_NAME)
    if not storage.exists(path):
        return None
    names = [field.name for field in dataclasses.fields(Certificate)]
    remedy = "Remove it, or run `dpsgd verify --resample` again."
    return Certificate(
        **read_fields(
            read_json(path), names, kind="certificate", remedy=remedy, **_HEADER
        )
    )


def copy(directory: StrPath, run: StrPath) -> None:
    """Copies the certificate of batches, if there is one, into the folder of a run.

    Args:
      directory: Folder of the batches.
      run: Folder of the run.
    """
    path = join(directory, CERTIFICATE_NAME)
    if storage.exists(path):
        data = storage.read_bytes(path)
        storage.write_atomically(join(run, CERTIFICATE_NAME), data)
