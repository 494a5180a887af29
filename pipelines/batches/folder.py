"""The files of a folder of batches beside the batches themselves.

    OUT/manifest.json             see ``pipelines.core.batches.manifest``; public
    OUT/certificate.json          see ``pipelines.core.batches.manifest``; public
    OUT/private/checksums.json    see ``pipelines.core.batches.manifest``; sensitive
    OUT/private/sampling.key      the key, unless it is kept elsewhere; sensitive

Files appear under their final name complete or not at all; the manifest comes last.

`read_batches` yields the batches in step order, without Beam and without TensorFlow:

    for batch in read_batches("batches"):
        batch.step, batch.columns["label"], batch.weight

It compares every record with its digest, as ``pipelines.core.batches.reader`` promises,
and yields every step and part once.  At most 64 MiB are read ahead from a store, or two
records if these are longer, whatever the size of the batches.

Public: the manifest.  Sensitive: every yielded batch.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accounting.core.validation import InputError
from pipelines.core.batches import reader
from pipelines.core.batches.manifest import (
    Certificate,
    Checksums,
    FileChecksum,
    Manifest,
    digest_of_seal,
    record_bytes,
)
from pipelines.core.batches.reader import CERTIFICATE_NAME as CERTIFICATE_NAME
from pipelines.core.batches.reader import CHECKSUMS_NAME as CHECKSUMS_NAME
from pipelines.core.batches.reader import MANIFEST_NAME as MANIFEST_NAME
from pipelines.core.batches.reader import PRIVATE_NAME as PRIVATE_NAME
from pipelines.files import storage
from pipelines.files.storage import StrPath

if TYPE_CHECKING:  # who reads a manifest needs no PyArrow
    from pipelines.core.batches.batch_format import PhysicalBatch

KEY_NAME = "sampling.key"

#: Maximum bytes and number of the ranges that are read ahead.
_AHEAD_BYTES, _MOST_AHEAD = 64 << 20, 8


def read_batches(
    directory: StrPath, *, first_step: int = 0, share: reader.Share = reader.ALL
) -> Iterator[PhysicalBatch]:
    """Yields every physical batch of steps ``first_step`` and later, in step order.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
      first_step: First step to read; a resumed run passes its number of finished steps.
      share: The parts of one of several workers, if not all.

    Raises:
      InputError: data are missing, changed, incomplete or repeated, or ``first_step``
        is out of range.
    """
    found = stored(directory)
    return found.batches(
        found.manifest(), found.checksums(), first_step=first_step, share=share
    )


def stored(directory: StrPath) -> reader.StoredBatches:
    """Returns the batches of a folder, of which nothing is read yet.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
    """
    return reader.StoredBatches(
        place=os.fspath(directory).rstrip("/"),
        read_file=storage.read_bytes,
        reader=functools.partial(_reader, directory),
    )


def _reader(
    directory: StrPath, manifest: Manifest, checksums: Checksums
) -> tuple[reader.Read, int]:
    return read_from(directory, checksums), _num_ahead(directory, manifest)


def _num_ahead(directory: StrPath, manifest: Manifest) -> int:
    """Returns how many ranges are read ahead: more of a store, which answers slowly."""
    if not storage.is_remote(directory):
        return 1
    record = record_bytes(manifest.columns, manifest.physical_batch_size)
    return max(2, min(_MOST_AHEAD, _AHEAD_BYTES // max(reader.RANGE_BYTES, record))) - 1


def read_from(directory: StrPath, checksums: Checksums) -> reader.Read:
    """Returns a function that reads the batch files of a folder, of their sizes.

    Args:
      directory: Folder of batches, local or in a store.
      checksums: From ``read_checksums``.
    """

    def read(name: str, start: int, count: int) -> bytes:
        path = storage.join(directory, name)
        try:
            # The sizes of a store's files are compared by ``verify``, and by the
            # trainer before its first step, in one listing.
            if not storage.is_remote(path) and storage.size(path) not in (
                None,
                checksums.files[name].size,
            ):
                raise reader.changed(path)
            return storage.read_range(path, start, count)
        except OSError as error:
            raise _unreadable(path, error) from None

    return read


def _unreadable(path: str, error: OSError) -> InputError:
    """Returns the error for a batch file that cannot be read."""
    reason, remedy = type(error).__name__, "Restore it, or make the batches again."
    if storage.is_remote(path):
        reason = error.strerror or reason
        remedy = "Give the same command again: a run goes on from its last checkpoint."
    return InputError(f"Expected batch file {path} to be readable: {reason}. {remedy}")


def read_manifest(directory: StrPath) -> Manifest:
    """Returns the manifest of a folder of batches.

    Raises:
      InputError: the manifest is missing, unfinished or damaged.
    """
    return stored(directory).manifest()


def read_checksums(directory: StrPath) -> Checksums:
    """Returns the checksums of a folder, after checking its manifest against them.

    Raises:
      InputError: the checksums are missing or damaged, or the manifest was edited.
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
    data = storage.pretty_json(manifest.to_json())
    checksums = Checksums(
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        files=files,
        inputs=tuple(sorted(set(input_digests))),
        seal_key=seal_key,
        key_sha256=_digest_of_key(directory),
        table=table or {},
    )
    storage.make_folder(storage.join(directory, PRIVATE_NAME))
    path = storage.join(directory, PRIVATE_NAME, CHECKSUMS_NAME)
    storage.write_atomically(path, storage.pretty_json(checksums.to_json()), mode=0o600)
    storage.write_atomically(storage.join(directory, MANIFEST_NAME), data)


def _digest_of_key(directory: StrPath) -> str:
    """Returns the SHA-256 of the key file of a folder; empty if it holds none.

    It is kept beside the key, which is uniform: it tells nothing that the key does not.
    """
    try:
        data = storage.read_bytes(storage.join(directory, PRIVATE_NAME, KEY_NAME))
    except FileNotFoundError:
        return ""
    return hashlib.sha256(data).hexdigest()


def is_same_key(directory: StrPath, checksums: Checksums) -> bool:
    """Whether the key file of a folder is the one that its batches were sampled with.

    A key that was moved elsewhere counts, too.

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
      manifest: Manifest of the batches.
      checksums: The checksums that were compared.
    """
    data = storage.pretty_json(Certificate.of(manifest, checksums).to_json())
    storage.write_atomically(storage.join(directory, CERTIFICATE_NAME), data)


def read_certificate(directory: StrPath) -> Certificate | None:
    """Returns the certificate in a folder of batches or of a run; None without one.

    Raises:
      InputError: the file cannot be read, or is no certificate.
    """
    path = storage.join(directory, CERTIFICATE_NAME)
    return (
        Certificate.from_json(storage.read_json(path)) if storage.exists(path) else None
    )


def check_certificate(
    directory: StrPath, manifest: Manifest, checksums: Checksums
) -> bool:
    """Whether batches are certified; refuses a certificate of others.

    Args:
      directory: Folder of the batches.
      manifest: Manifest of the batches.
      checksums: Checksums of the batches.

    Raises:
      InputError: the certificate cannot be read, or is about other batches.
    """
    found = read_certificate(directory)
    if found is None:
        return False
    records = digest_of_seal(checksums.seal.hex())
    if not found.is_about(manifest.fingerprint, records):
        raise InputError(
            f"Expected {storage.join(directory, CERTIFICATE_NAME)} to be about these "
            "batches. Remove it, or run `dpsgd verify --resample`."
        )
    return True
