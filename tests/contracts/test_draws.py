"""What tests draw at random depends on the test alone."""

from __future__ import annotations

import random
import secrets
from typing import Any

import numpy as np

from tests.draws import drawn_by


def _draws() -> list[Any]:
    return [
        secrets.token_bytes(32),
        secrets.token_hex(16),
        np.random.default_rng().random(),
        np.random.random(),
        random.random(),
    ]


def test_one_name_draws_the_same_and_another_something_else() -> None:
    found = []
    for name in ("one", "another", "one"):
        with drawn_by(name):
            found.append(_draws())
    assert found[0] == found[2]
    assert not any(map(np.array_equal, found[0], found[1]))


def test_what_a_fixture_draws_amid_a_test_changes_no_draw_after_it() -> None:
    found = []
    for with_fixture in (False, True):
        with drawn_by("test"):
            secrets.token_bytes(32)
            if with_fixture:
                with drawn_by("fixture"):
                    secrets.token_bytes(32)
            found.append(secrets.token_bytes(32))
    assert found[0] == found[1]


def test_names_of_temporary_files_and_seeds_stay_what_they_are() -> None:
    found = []
    for _ in range(2):
        with drawn_by("test"):
            found.append((secrets.token_hex(8), np.random.default_rng(5).random()))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_every_test_has_a_stream() -> None:
    """Of its name, which is known."""
    first = secrets.token_bytes(32)
    with drawn_by("tests/contracts/test_draws.py::test_every_test_has_a_stream"):
        assert secrets.token_bytes(32) == first
