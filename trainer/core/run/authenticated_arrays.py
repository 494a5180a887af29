"""Arrays in a file that is complete or absent, and authenticated against changes.

The file is NumPy's ``.npz`` followed by a message authentication code, which NumPy
ignores: ``numpy.load`` reads it without the key.

Formal guarantees:
  - ``read`` returns exactly the arrays of the last finished ``write``, bit for bit; a
    write that was killed leaves the file before it.
  - A file that was cut short, edited, or written under another key or label is refused.
  - Equal arrays, keys and labels give equal bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pathlib
from collections.abc import Mapping
from typing import cast

import numpy as np

from pipelines.core.files.local_files import write_atomically
from pipelines.core.keys import KEY_BYTES, derive


class DamagedError(Exception):
    """The file was not written under this key and label, or was changed."""


def write(
    path: pathlib.Path,
    arrays: Mapping[str, np.ndarray],
    *,
    key: bytes,
    label: str,
    mode: int = 0o644,
) -> None:
    """Replaces the file by ``arrays``.

    Args:
      path: Path of the file, in an existing folder.
      arrays: Name -> array.
      key: Key of the message authentication code.  Sensitive.
      label: Purpose of the file; it can only be read under the same label.
      mode: Permissions, before the umask.
    """
    buffer = io.BytesIO()
    np.savez(buffer, **cast(dict, arrays))
    with buffer.getbuffer() as view:
        code = mac(view, key, label)
    buffer.write(code)
    # A view and not a copy: the arrays may be most of the memory.
    with buffer.getbuffer() as view:
        write_atomically(path, cast(bytes, view), mode=mode)


def read(path: pathlib.Path, *, key: bytes, label: str) -> dict[str, np.ndarray]:
    """Returns the arrays by name.

    Args:
      path: Path of the file.
      key: As of `write`.
      label: As of `write`.

    Raises:
      FileNotFoundError: there is no file.
      DamagedError: the file was changed, or written under another key or label.
    """
    return parse(path.read_bytes(), key=key, label=label)


def parse(data: bytes, *, key: bytes, label: str) -> dict[str, np.ndarray]:
    """Returns the arrays by name.

    Args:
      data: Contents of a file that `write` wrote.
      key: As of `write`.
      label: As of `write`.

    Raises:
      DamagedError: as `read`.
    """
    view = memoryview(data)[:-KEY_BYTES]
    if not hmac.compare_digest(data[-KEY_BYTES:], mac(view, key, label)):
        raise DamagedError
    with np.load(io.BytesIO(view), allow_pickle=False) as arrays:
        return dict(arrays)


def mac(data: bytes | memoryview, key: bytes, label: str) -> bytes:
    """Returns the message authentication code of data, ``KEY_BYTES`` bytes.

    Args:
      data: What is authenticated.
      key: Secret key.
      label: Purpose of the data, as of `write`.
    """
    return derive(key, label, hashlib.sha256(data).hexdigest())
