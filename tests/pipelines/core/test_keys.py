"""Sub-keys and commitments of pipelines.core.keys."""

from __future__ import annotations

from pipelines.core.keys import commitment, derive
from pipelines.files.key_sources import insecure_key


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
    one, other = insecure_key(1), insecure_key(2)
    assert commitment(one, "x") == commitment(one, "x")
    assert commitment(one, "x") != commitment(other, "x")
    assert commitment(one, "x") != commitment(one, "y")
    assert len(commitment(one)) == 32
