"""Sub-keys of a secret key, and public names for it.

Formal guarantees:
  - A new key is uniform, as far as the operating system's random numbers are.
  - Sub-keys of one key under different label tuples are independent and uniform, up to
    the PRF assumption on keyed BLAKE2b; no sub-key reveals the key.
  - A commitment reveals nothing about key and labels, under the same assumption.

Public: labels, unless a caller says otherwise, and commitments.  Sensitive: keys.
"""

from __future__ import annotations

import hashlib
import json
import secrets

#: Bytes of a key and of a sub-key.
KEY_BYTES = 32


def new_key() -> bytes:
    """Returns a key of 256 bits from the operating system.  Secret."""
    return secrets.token_bytes(KEY_BYTES)


def derive(key: bytes, *labels: str | int) -> bytes:
    """Returns the 32-byte sub-key of ``key`` for a tuple of labels.

    Args:
      key: Secret, at most 64 bytes.
      *labels: Encoded as JSON, so that ("a", "bc") and ("ab", "c") differ.
    """
    data = json.dumps(labels, separators=(",", ":")).encode("utf-8")
    return hashlib.blake2b(
        data, key=key, digest_size=KEY_BYTES, person=b"dpsgd-v1"
    ).digest()


def commitment(key: bytes, *labels: str | int) -> str:
    """Returns a public 32-digit name for ``key`` that reveals nothing about it.

    Equal names mean equal keys and labels, up to collisions of 128 bits.

    Args:
      key: Secret, at most 64 bytes.
      *labels: As in ``derive``.
    """
    return derive(key, "commitment", *labels)[:16].hex()
