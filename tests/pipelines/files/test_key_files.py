"""Guarantees of pipelines.files.key_sources."""

from __future__ import annotations

import os
import pathlib
import sys
import uuid
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.files import key_sources as keys
from pipelines.files import storage


def test_a_new_key_is_256_bits_in_a_file_of_mode_0600(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "key"
    key = keys.create_key_file(path)
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert keys.read_key_file(path) == key
    assert list(path.parent.iterdir()) == [path]
    assert keys.create_key_file(tmp_path / "other") != key


def test_an_existing_key_is_never_replaced(tmp_path: pathlib.Path) -> None:
    key = keys.create_key_file(tmp_path / "key")
    with pytest.raises(InputError, match="not to exist"):
        keys.create_key_file(tmp_path / "key")
    assert keys.read_or_create_key_file(tmp_path / "key") == key
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(
    tmp_path: pathlib.Path, mode: int
) -> None:
    path = tmp_path / "key"
    secret = keys.create_key_file(path).hex()
    path.chmod(mode)
    with pytest.raises(InputError, match="chmod 600") as error:
        keys.read_key_file(path)
    assert secret not in str(error.value)


@pytest.mark.parametrize("text", ["", "00" * 33, "zz" * 32, "\xe9"])
def test_a_file_that_is_not_one_key_is_refused(
    tmp_path: pathlib.Path, text: str
) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(InputError) as error:
        keys.read_key_file(path)
    assert not text or text not in str(error.value)


def test_a_key_in_a_store_is_read_and_never_made_there(s3_bucket: str) -> None:
    location = f"{s3_bucket}/{uuid.uuid4().hex}/sampling.key"
    with pytest.raises(InputError, match="readable"):
        keys.read_or_create_key_file(location)
    assert not storage.exists(location)
    storage.write_atomically(location, b"5a" * 32 + b"\n")
    assert keys.read_or_create_key_file(location) == b"\x5a" * 32


def test_a_managed_secret_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to Google's library, which no lock file holds."""
    name = "secretmanager://projects/p/secrets/sampling-key/versions/"
    if "google.cloud.secretmanager" not in sys.modules:
        with pytest.raises(InputError, match="pip install google-cloud-secret-manager"):
            keys.read_key_file(f"{name}1")
    asked: list[Any] = []

    class Client:
        def access_secret_version(self, request: dict[str, str]) -> Any:
            asked.append(request)
            if request["name"].endswith("/2"):
                raise PermissionError("quotes a token")
            return type("R", (), {"payload": type("P", (), {"data": b"5a" * 32})})

    module = type(sys)("google.cloud.secretmanager")
    module.SecretManagerServiceClient = Client  # type: ignore[attr-defined]
    cloud = type(sys)("google.cloud")
    cloud.secretmanager = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google.cloud", cloud)
    monkeypatch.setitem(sys.modules, "google.cloud.secretmanager", module)
    assert keys.read_key_file(f"{name}1") == b"\x5a" * 32
    assert asked == [{"name": "projects/p/secrets/sampling-key/versions/1"}]
    with pytest.raises(InputError, match="readable") as error:
        keys.read_key_file(f"{name}2")
    assert "token" not in str(error.value)
