"""Batches in their folder: what they are, and their records.

    OUT/manifest.json             see ``manifest``; public
    OUT/certificate.json          see ``certificate``; public
    OUT/private/checksums.json    see ``manifest``; sensitive

Formal guarantees:
  - ``checksums`` refuses a manifest that was edited.
  - ``batches`` yields what ``reader.read_records`` does, with its guarantees.

The functions that get bytes, from this machine or a store, are not trusted.

Public: manifest, certificate and names.  Sensitive: checksums and batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from accounting.core.validation import check_int
from pipelines.core.batches.manifest import Checksums, Manifest, digest_of_seal
from pipelines.core.batches.ranges import ALL, Share
from pipelines.core.files.json_files import find, read_json, read_known
from pipelines.core.files.local_files import StrPath
from pipelines.core.keys import commitment

if TYPE_CHECKING:
    from pipelines.core.batches.batch_format import PhysicalBatch
    from pipelines.core.batches.ranges import Read

MANIFEST_NAME = "manifest.json"
CERTIFICATE_NAME = "certificate.json"
PRIVATE_NAME = "private"
CHECKSUMS_NAME = "checksums.json"

_UNFINISHED = "The folder holds no finished batches; run `dpsgd batches` to the end."


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredBatches:
    """The batches of a folder, here or in a store.

    Attributes:
      place: The folder, for messages.
      read_file: Returns the contents of a file by its path, or raises an OSError.
      reader: Returns a function that reads batch files of a manifest with checksums,
        and the number of ranges that are read while one is used.
    """

    place: str
    read_file: Callable[[StrPath], bytes]
    reader: Callable[[Manifest, Checksums], tuple[Read, int]]

    def manifest(self) -> Manifest:
        """Returns the manifest.

        Raises:
          InputError: missing, unfinished or damaged.
        """
        path = f"{self.place}/{MANIFEST_NAME}"
        found = read_json(path, remedy=_UNFINISHED, read=self.read_file)
        return Manifest.from_json(found)

    def checksums(self) -> Checksums:
        """Returns the checksums, after checking the manifest against them.

        Raises:
          InputError: missing or damaged, or the manifest was edited.
        """
        fields = read_json(
            f"{self.place}/{PRIVATE_NAME}/{CHECKSUMS_NAME}",
            remedy="Without it the batches cannot be verified.",
            read=self.read_file,
        )
        path = f"{self.place}/{MANIFEST_NAME}"
        manifest = read_known(path, remedy=_UNFINISHED, read=self.read_file)
        return Checksums.of(manifest, fields)

    def certificate(self) -> bytes | None:
        """Returns the contents of the certificate; None if there is none.

        Raises:
          InputError: no access.
        """
        return find(f"{self.place}/{CERTIFICATE_NAME}", self.read_file)

    def key_name(self) -> str:
        """Returns a public name of the key that sampled them, whatever their layout.

        Raises:
          InputError: as ``checksums``.
        """
        seal_key = bytes.fromhex(self.checksums().seal_key)  # made of that key
        return commitment(seal_key, "sampling key")

    def records_id(self) -> str:
        """Returns a public name of the manifest and all records.

        Raises:
          InputError: as ``checksums``.
        """
        return digest_of_seal(self.checksums().seal.hex())

    def batches(
        self,
        manifest: Manifest,
        checksums: Checksums,
        *,
        first_step: int = 0,
        share: Share = ALL,
    ) -> Iterator[PhysicalBatch]:
        """Yields the physical batches of ``first_step`` and later, in step order.

        Args:
          manifest: From ``manifest``.
          checksums: From ``checksums``.
          first_step: First step to read; a resumed run passes its finished steps.
          share: The parts of one of several workers, if not all.

        Raises:
          InputError: missing, changed, incomplete or repeated data, or ``first_step``
            is out of range.
        """
        from pipelines.core.batches.reader import read_records  # needs PyArrow

        last = manifest.plan.num_steps
        check_int("first_step", first_step, at_least=0, at_most=last)
        read, ahead = self.reader(manifest, checksums)
        return read_records(
            manifest, checksums, read, share, first_step=first_step, ahead=ahead
        )
