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

from accounting.core.validation import InputError
from accounting.core.versioned_json import header, installed_version, read_fields
from pipelines.core.batches.manifest import Checksums, Manifest

_HEADER: Any = {"format_name": "dpsgd-certificate", "version": 1}
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
          manifest: Their manifest.
          checksums: Their checksums, which must equal the reference's.
        """
        return cls(
            manifest_fingerprint=manifest.fingerprint,
            seal=checksums.seal.hex(),
            versions={name: installed_version(name) for name in _PACKAGES},
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, with ``format`` and ``version``."""
        return {**header(**_HEADER), **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, fields: Any) -> Certificate:
        """Returns the certificate that ``to_json`` wrote.

        Raises:
          InputError: not a certificate.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        remedy = "Remove it, or run `dpsgd verify --resample` again."
        found = read_fields(fields, names, kind="certificate", remedy=remedy, **_HEADER)
        return cls(**found)

    def is_about(self, manifest_fingerprint: str, records_id: str) -> bool:
        """Whether it certifies the records of a run.

        Args:
          manifest_fingerprint: That of the manifest.
          records_id: ``digest_of_seal`` of the batches.
        """
        return (
            self.manifest_fingerprint == manifest_fingerprint
            and digest_of_seal(self.seal) == records_id
        )


def digest_of_seal(seal: str) -> str:
    """Returns a public name of what was sealed: the SHA-256 of the seal's digits."""
    return hashlib.sha256(seal.encode()).hexdigest()
