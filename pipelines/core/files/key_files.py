"""Secret keys: made and kept in files of this machine.

Formal guarantees:
  - A new key is in a file of mode 0600 that did not exist before; a half-written key is
    never visible under its final name.
  - A key file that others can read is refused, as is anything that does not hold
    exactly one key.
  - No function here has a default key or seed.

Sensitive: keys; no message holds them.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import stat
from collections.abc import Callable

from accounting.core.validation import InputError
from pipelines.core.files.local_files import StrPath, make_folder
from pipelines.core.keys import KEY_BYTES, new_key


def create_key_file(path: StrPath) -> bytes:
    """Makes a key, saves it at ``path`` with mode 0600, and returns it.

    A missing folder is made, with access only for its owner.

    Raises:
      InputError: ``path`` exists already.
    """
    target = pathlib.Path(path)
    make_folder(target.parent)
    key = new_key()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, target)  # atomic, and fails where the target exists
    except FileExistsError:
        raise InputError(
            f"Expected key file {target} not to exist. Read it, or choose another path."
        ) from None
    finally:
        os.unlink(temporary)
    return key


def private_text(location: str) -> bytes:
    """Returns the contents of a file of this machine that nobody else can read.

    Raises:
      InputError: it is no file, or others can read it.
      OSError: it cannot be read.
    """
    mode = os.stat(location).st_mode
    if not stat.S_ISREG(mode):  # a pipe would wait for a writer
        raise InputError(
            f"Expected key file {location} to be a file; it is a folder, a pipe or a "
            "device. Write the key into a file of mode 0600, and name that."
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"Expected key file {location} mode {stat.S_IMODE(mode):04o} to be 0600. "
            f"Others can read it; run `chmod 600 {location}`, or make a new key."
        )
    return pathlib.Path(location).read_bytes()


def read_key_file(path: StrPath, read: Callable[[str], bytes] = private_text) -> bytes:
    """Returns the key in a file.

    Args:
      path: Path of the file.
      read: Returns the contents of a file, or raises an InputError or an OSError.

    Raises:
      InputError: the file is missing, readable by others, or does not hold one key.
    """
    location = os.fspath(path)
    try:
        text = read(location).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"Expected key file {location} to be readable: {type(error).__name__}."
        ) from None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InputError(
            f"Expected key file {location} to hold {2 * KEY_BYTES} hexadecimal digits."
        )
    return key


def read_or_create_key_file(path: StrPath) -> bytes:
    """Returns the key in a file, which is made if missing.

    Raises:
      InputError: ``read_key_file`` refuses the file.
    """
    return read_key_file(path) if os.path.lexists(path) else create_key_file(path)
