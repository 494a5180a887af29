"""Secret keys: made and kept in files.  Their sub-keys are in ``pipelines.core.keys``.

Formal guarantees:
  - A new key is in a file of mode 0600 that did not exist before; a half-written key is
    never visible under its final name.
  - A key file of this machine that others can read is refused, as is anything that does
    not hold exactly one key.  In a store, its access rules decide who can read it.
  - No function here has a default key or seed.

Sensitive: keys; no message holds them.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import stat

from accounting.core.validation import InputError
from pipelines.core.keys import KEY_BYTES, derive, new_key
from pipelines.files.paths import StrPath, is_remote
from pipelines.files.storage import make_folder, read_bytes, read_secret

#: Prefix of keys in Google's Secret Manager, before
#: projects/NAME/secrets/NAME/versions/NUMBER.
SECRET_MANAGER = "secretmanager://"


def insecure_key(seed: int) -> bytes:
    """Returns a key for tests, derived from a number that anyone can guess."""
    return derive(b"insecure", "seed", seed)


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


def _read_text(location: str) -> str:
    """Returns the text at ``location``; refuses a local file that others can read."""
    if location.startswith(SECRET_MANAGER):
        return read_secret(location.removeprefix(SECRET_MANAGER)).decode("ascii")
    mode = stat.S_IFREG if is_remote(location) else os.stat(location).st_mode
    if not stat.S_ISREG(mode):  # a pipe would wait for a writer
        raise InputError(
            f"Expected key file {location} to be a file; it is a folder, a pipe or a "
            "device. Write the key into a file of mode 0600, and name that."
        )
    text = read_bytes(location).decode("ascii")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"Expected key file {location} mode {stat.S_IMODE(mode):04o} to be 0600. "
            f"Others can read it; run `chmod 600 {location}`, or make a new key."
        )
    return text


def read_key_file(path: StrPath) -> bytes:
    """Returns the key at ``path``: a file, an object in a store, or a managed secret.

    Raises:
      InputError: the file is missing, readable by others, or does not hold one key.
    """
    location = os.fspath(path)
    try:
        text = _read_text(location).strip()
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
    """Returns the key at ``path``; makes a missing local file.

    Raises:
      InputError: ``read_key_file`` refuses the file, or it is missing in a store, where
        two jobs could make it at once.
    """
    if is_remote(path) or os.path.lexists(path):
        return read_key_file(path)
    return create_key_file(path)
