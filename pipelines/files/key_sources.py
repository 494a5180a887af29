"""Secret keys in files, in stores, and in Google's Secret Manager.

Formal guarantees, beside those of ``pipelines.core.keys``:
  - In a store, its access rules decide who can read a key.

Sensitive: keys; no message holds them.
"""

from __future__ import annotations

import errno

from accounting.core.validation import InputError
from pipelines.core import keys
from pipelines.core.keys import create_key_file as create_key_file
from pipelines.core.keys import derive
from pipelines.files.storage import StrPath, is_remote, read_bytes

#: Prefix of keys in Google's Secret Manager, before
#: projects/NAME/secrets/NAME/versions/NUMBER.
SECRET_MANAGER = "secretmanager://"


def insecure_key(seed: int) -> bytes:
    """Returns a key for tests, derived from a number that anyone can guess."""
    return derive(b"insecure", "seed", seed)


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
    return keys.private_text(location)


def read_key_file(path: StrPath) -> bytes:
    """Returns the key at ``path``: a file, an object in a store, or a managed secret.

    Raises:
      InputError: the file is missing, readable by others, or does not hold one key.
    """
    return keys.read_key_file(path, _text)


def read_or_create_key_file(path: StrPath) -> bytes:
    """Returns the key at ``path``; makes a missing local file.

    Raises:
      InputError: ``read_key_file`` refuses the file, or it is missing in a store, where
        two jobs could make it at once.
    """
    if is_remote(path):
        return read_key_file(path)
    return keys.read_or_create_key_file(path)
