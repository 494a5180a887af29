"""Commands know what is registered when they run, and refuse what is not."""

from __future__ import annotations

import json

import pytest

from accounting import comparison
from accounting.core import sampler_registry
from tests.accounting.samplers.test_registry import NAME, RULES, WHOLE
from tests.command_line import invoke
from tests.sampler_fields import may_register

ASKED = (
    "--num-examples=60", "--batch-size=30", "--delta=1e-3", f"--sampler={NAME}",
)  # fmt: skip


def test_a_sampler_from_outside_is_a_choice_of_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for command in ("plan", "account", "audit"):
        refused = invoke([command, *ASKED, "--epochs=1", "--noise-multiplier=2"])
        assert f"'{NAME}' to be one of deterministic" in refused.output
        assert refused.exit_code == 2
    may_register(monkeypatch)
    sampler_registry.register(NAME, RULES, WHOLE)
    given = ["--num-steps=2", "--noise-multiplier=2", "--json"]
    said = invoke(["account", *ASKED, *given])
    fields = json.loads(said.output)
    assert fields["theorem"] == "the coins are revealed"
    planned = invoke(["plan", *ASKED, "--epochs=1", "--epsilon=3", "--json"])
    assert NAME in planned.output, planned.exception
    assert NAME in comparison.default_samplers()
