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
