"""No accepted model, loss or view lets one row move a step's sum beyond its bound."""

from __future__ import annotations

import pytest

from tests.trainer.gradients.attacks.cases import CASES, OF_BOTH_PATHS
from tests.trainer.gradients.attacks.harness import faults_of, outcome_of, step_of
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES


@pytest.mark.parametrize(
    ("name", "base"),
    [
        *((name, ONE_PASS) for name in CASES),
        *(
            pytest.param(name, SINGLE_EXAMPLES, marks=pytest.mark.thorough)
            for name in OF_BOTH_PATHS
        ),
    ],
)
def test_one_row_is_bounded_or_the_model_is_refused(name: str, base: str) -> None:
    """A refusal is one line with a reason; an accepted case has no fault."""
    case = CASES[name]
    refusal, found = outcome_of(
        lambda: faults_of(step_of(case, base)) + ["it was accepted"] * case.leaks
    )
    assert not found
    if refusal is not None:
        assert not case.honest, refusal
        assert "\n" not in refusal, refusal
        assert len(refusal) > 40, refusal
