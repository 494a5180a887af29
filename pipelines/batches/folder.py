"""The files of a folder of batches beside the batches themselves.

    OUT/manifest.json             see ``pipelines.core.batches.manifest``; public
    OUT/certificate.json          see ``pipelines.core.batches.manifest``; public
    OUT/private/checksums.json    see ``pipelines.core.batches.manifest``; sensitive
    OUT/private/sampling.key      the key, unless it is kept elsewhere; sensitive

Formal guarantees:
  - Files appear under their final name complete or not at all; the manifest comes last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from accounting.core.validation import InputError
from pipelines.batches.reader import stored
from pipelines.core.batches.manifest import (
    Certificate,
    Checksums,
    FileChecksum,
    Manifest,
    digest_of_seal,
)
from pipelines.core.batches.stored import CERTIFICATE_NAME as CERTIFICATE_NAME
from pipelines.core.batches.stored import CHECKSUMS_NAME as CHECKSUMS_NAME
from pipelines.core.batches.stored import MANIFEST_NAME as MANIFEST_NAME
from pipelines.core.batches.stored import PRIVATE_NAME as PRIVATE_NAME
from pipelines.files.storage import (
    StrPath,
    exists,
    join,
    make_folder,
    pretty_json,
    read_bytes,
    read_json,
    write_atomically,
)

KEY_NAME = "sampling.key"


def read_manifest(directory: StrPath) -> Manifest:
    """Returns the manifest of a folder of batches.

    Raises:
      InputError: missing, unfinished or damaged.
    """
    return stored(directory).manifest()


def read_checksums(directory: StrPath) -> Checksums:
    """Returns the checksums of a folder, after checking its manifest against them.

    Raises:
      InputError: missing or damaged, or the manifest was edited.
    """
    return stored(directory).checksums()


def write_manifest(
    directory: StrPath,
    manifest: Manifest,
    files: Mapping[str, FileChecksum],
    *,
    input_digests: Collection[str] = (),
    seal_key: str,
    table: Mapping[str, Any] | None = None,
) -> None:
    """Writes the checksums, then the manifest, whose presence means a finished job.

    Args:
      directory: Folder of the batches.
      manifest: Description of the batches.
      files: Name of a batch file -> its checksums.
      input_digests: ``parquet_blocks.footer_digest`` of each file of the input.
      seal_key: Hex digits of the secret key of the seal.
      table: Fields of the `SourceTable` of the examples, if it is known.
    """
    data = pretty_json(manifest.to_json())
    checksums = Checksums(
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        files=files,
        inputs=tuple(sorted(set(input_digests))),
        seal_key=seal_key,
        key_sha256=_digest_of_key(directory),
        table=table or {},
    )
    make_folder(join(directory, PRIVATE_NAME))
    path = join(directory, PRIVATE_NAME, CHECKSUMS_NAME)
    write_atomically(path, pretty_json(checksums.to_json()), mode=0o600)
    write_atomically(join(directory, MANIFEST_NAME), data)


def _digest_of_key(directory: StrPath) -> str:
    """Returns the SHA-256 of the key file of a folder; empty if it holds none.

    It is kept beside the key, which is uniform: it tells nothing that the key does not.
    """
    try:
        data = read_bytes(join(directory, PRIVATE_NAME, KEY_NAME))
    except FileNotFoundError:
        return ""
    return hashlib.sha256(data).hexdigest()


def is_same_key(directory: StrPath, checksums: Checksums) -> bool:
    """Whether the key file of a folder is the one that its batches were sampled with.

    So it counts if the key was moved elsewhere.

    Args:
      directory: Folder of the batches.
      checksums: From ``read_checksums``.
    """
    found = _digest_of_key(directory)
    return not checksums.key_sha256 or not found or checksums.key_sha256 == found


def write_certificate(
    directory: StrPath, manifest: Manifest, checksums: Checksums
) -> None:
    """Writes the certificate of batches that were compared with the reference.

    Args:
      directory: Folder of the batches.
      manifest: Their manifest.
      checksums: The checksums that were compared.
    """
    data = pretty_json(Certificate.of(manifest, checksums).to_json())
    write_atomically(join(directory, CERTIFICATE_NAME), data)


def read_certificate(directory: StrPath) -> Certificate | None:
    """Returns the certificate in a folder of batches or of a run; None without one.

    Raises:
      InputError: unreadable, or not a certificate.
    """
    path = join(directory, CERTIFICATE_NAME)
    return Certificate.from_json(read_json(path)) if exists(path) else None


def check_certificate(
    directory: StrPath, manifest: Manifest, checksums: Checksums
) -> bool:
    """Whether batches are certified; refuses a certificate of others.

    Args:
      directory: Folder of the batches.
      manifest: Their manifest.
      checksums: Their checksums.

    Raises:
      InputError: unreadable, or about other batches.
    """
    found = read_certificate(directory)
    if found is None:
        return False
    records = digest_of_seal(checksums.seal.hex())
    if not found.is_about(manifest.fingerprint, records):
        raise InputError(
            f"Expected {join(directory, CERTIFICATE_NAME)} to be about these batches. "
            "Remove it, or run `dpsgd verify --resample`."
        )
    return True
