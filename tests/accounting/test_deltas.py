"""What a delta is worth: said, and enforced."""

from __future__ import annotations

from typing import Any

import pytest

from accounting import statement
from accounting.core.validation import InputError
from tests.accounting.plans import make_plan
from trainer.settings.train_settings import TrainSettings

NUM_EXAMPLES = 600
PLAN = make_plan("poisson", NUM_EXAMPLES, 60, 10)


def test_settings_and_statements_refuse_a_large_delta_as_the_commands_do() -> None:
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "l2_norm_clip": 1.0}
    with pytest.raises(InputError, match="allow_large_delta=True"):
        TrainSettings(target_delta=0.5, **settings)
    TrainSettings(target_delta=0.5, allow_large_delta=True, **settings)
    with pytest.raises(InputError, match=r"delta=0\.5 < 0\.01"):
        statement.privacy_statement(PLAN, delta=0.5, **settings)
    statement.privacy_statement(PLAN, delta=0.5, allow_large_delta=True, **settings)


@pytest.mark.parametrize(
    ("delta", "weak"),
    [(1 / NUM_EXAMPLES, True), (0.005, True), (0.99 / NUM_EXAMPLES, False)],
)
def test_a_statement_at_one_over_n_says_that_it_protects_next_to_nothing(
    delta: float, weak: bool
) -> None:
    said = statement.privacy_statement(PLAN, noise_multiplier=2.0, delta=delta)
    assert ("protects next to nothing" in said.claim) == weak
    assert ("protects next to nothing" in said.to_text()) == weak
    assert ("protects next to nothing" in said.to_json()["claim"]) == weak
    assert (said.to_json()["weakness"] is not None) == weak
    # What no guarantee is claimed for needs no second warning.
    none = statement.privacy_statement(PLAN, noise_multiplier=0.0, delta=delta)
    assert none.claim.startswith("No guarantee")
