"""Guarantees of pipelines.files.key_files."""

from __future__ import annotations

import os
import pathlib

import pytest

from accounting.core.validation import InputError
from pipelines.core.keys import commitment, derive
from pipelines.files import key_files as keys


def test_a_new_key_is_256_bits_in_a_file_of_mode_0600(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "key"
    key = keys.create_key_file(path)
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.read_key_file(path) == key
    assert list(path.parent.iterdir()) == [path]
    assert keys.create_key_file(tmp_path / "other") != key


def test_an_existing_key_is_never_replaced(tmp_path: pathlib.Path) -> None:
    key = keys.create_key_file(tmp_path / "key")
    with pytest.raises(InputError, match="not to exist"):
        keys.create_key_file(tmp_path / "key")
    assert keys.read_or_create_key_file(tmp_path / "key") == key
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666])
def test_a_key_that_others_can_read_is_refused(
    tmp_path: pathlib.Path, mode: int
) -> None:
    path = tmp_path / "key"
    secret = keys.create_key_file(path).hex()
    path.chmod(mode)
    with pytest.raises(InputError, match="chmod 600") as error:
        keys.read_key_file(path)
    assert secret not in str(error.value)


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "zz" * 32, "\xe9"])
def test_a_file_that_is_not_one_key_is_refused(
    tmp_path: pathlib.Path, text: str
) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(InputError) as error:
        keys.read_key_file(path)
    assert not text or text not in str(error.value)


def test_sub_keys_differ_by_every_label_and_by_key() -> None:
    derived = {
        derive(key, *labels)
        for key in (bytes(32), bytes(31) + b"\1")
        for labels in [("a",), ("a", 1), ("a", "1"), ("a1",), ("a", "b"), ("ab",), ()]
    }
    assert len(derived) == 14
    assert {len(key) for key in derived} == {32}


def test_derivation_golden_value() -> None:
    """BLAKE2b-256, key 0^32, person "dpsgd-v1", of the JSON text ["noise",7,"w"]."""
    assert derive(bytes(32), "noise", 7, "w").hex() == GOLDEN


GOLDEN = "6b5beb6b700d896775cf1e42a240b11ea5bb60b3d9d551b924d9e7c74610911d"


def test_a_commitment_names_the_key_without_telling_it() -> None:
    one, other = keys.insecure_key(1), keys.insecure_key(2)
    assert commitment(one, "x") == commitment(one, "x")
    assert commitment(one, "x") != commitment(other, "x")
    assert commitment(one, "x") != commitment(one, "y")
    assert len(commitment(one)) == 32
