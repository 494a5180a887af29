"""No accepted model, loss or view lets one row move a step's sum beyond its bound."""

from __future__ import annotations

from typing import Any

import pytest

from accounting.validation import InputError
from tests.trainer.gradients.attacks import (
    custom_gradients,
    hidden_writes,
    honest,
    keras_layers,
    losses,
    mixing,
    other_state,
    python_state,
    views,
    writes,
)
from tests.trainer.gradients.attacks.catalogue import Case
from tests.trainer.gradients.attacks.harness import compositions, faults_of, step_of
from tests.trainer.gradients.attacks.keras_parts import BASES

CASES: dict[str, Case] = {
    **writes.CASES,
    **hidden_writes.CASES,
    **other_state.CASES,
    **python_state.CASES,
    **keras_layers.CASES,
    **mixing.CASES,
    **custom_gradients.CASES,
    **losses.CASES,
    **views.CASES,
    **honest.CASES,
    **honest.NEIGHBOURS,
}


def test_there_are_enough_of_them() -> None:
    assert sum(not case.honest for case in CASES.values()) >= 200


def assert_refused_or_bounded(case: Case, base: str, names: Any = ()) -> None:
    """A refusal is one line with a reason; an accepted case has no fault."""
    try:
        built = step_of(case, base)
    except InputError as error:
        assert not case.honest, error
        line = str(error)
        assert "\n" not in line, line
        assert len(line) > 40, line
        return
    assert not faults_of(built, names)
    assert not case.leaks, "it was accepted"


def test_one_row_is_bounded_or_the_model_is_refused(name: str) -> None:
    assert_refused_or_bounded(CASES[name], "book-keeping")
