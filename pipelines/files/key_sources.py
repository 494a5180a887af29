"""Secret keys in files, in stores, and in Google's Secret Manager.

``pipelines.core.keys`` makes and checks keys in files of this machine.  In a store, its
access rules decide who can read a key.

Sensitive: keys; no message holds them.
"""

from __future__ import annotations

import errno
import os
import stat

from accounting.core.validation import InputError
from pipelines.core.keys import KEY_BYTES, derive, new_key
from pipelines.files.storage import StrPath, create, is_remote, make_folder, read_bytes

#: Prefix of keys in Google's Secret Manager, before
#: projects/NAME/secrets/NAME/versions/NUMBER.
SECRET_MANAGER = "secretmanager://"


def insecure_key(seed: int) -> bytes:
    """Returns a key for tests, derived from a number that anyone can guess."""
    return derive(b"insecure", "seed", seed)


def create_key_file(path: StrPath) -> bytes:
    """Makes a key, saves it in a file of this machine, and returns it.

    A missing folder is made, with access only for its owner.

    Raises:
      InputError: ``path`` exists already.
    """
    make_folder(os.path.dirname(os.path.abspath(path)))
    key = new_key()
    if not create(path, f"{key.hex()}\n".encode(), mode=0o600):
        raise InputError(f"Expected key file {path} not to exist.")
    return key


def _managed(version: str) -> bytes:
    """Returns a version of a secret of Google's Secret Manager."""
    try:
        from google.cloud import secretmanager
    except ImportError:
        raise InputError(
            f"Expected a client for {SECRET_MANAGER}{version}: pip install "
            "google-cloud-secret-manager."
        ) from None
    try:
        client = secretmanager.SecretManagerServiceClient()
        return client.access_secret_version(request={"name": version}).payload.data
    except Exception as error:  # its message may quote a token
        raise OSError(errno.EACCES, type(error).__name__, version) from None


def _text(location: str) -> bytes:
    """Returns the text at ``location``; refuses a local file that others can read."""
    if location.startswith(SECRET_MANAGER):
        return _managed(location.removeprefix(SECRET_MANAGER))
    if is_remote(location):
        return read_bytes(location)
    mode = os.stat(location).st_mode
    if not stat.S_ISREG(mode):  # a pipe would wait for a writer
        raise InputError(
            f"Expected key file {location} to be a file; it is a folder, a pipe or a "
            "device."
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"Expected key file {location} mode {stat.S_IMODE(mode):04o} to be 0600. "
            f"Others can read it; run `chmod 600 {location}`, or make a new key."
        )
    return read_bytes(location)


def read_key_file(path: StrPath) -> bytes:
    """Returns the key at ``path``: a file, an object in a store, or a managed secret.

    Raises:
      InputError: the file is missing, readable by others, or does not hold one key.
    """
    location = os.fspath(path)
    try:
        text = _text(location).decode("ascii").strip()
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
