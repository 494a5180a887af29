"""Commands know what is registered when they run, and refuse what is not."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from accounting.cli.commands import plan_command
from accounting.core import sampler_registry
from accounting.planning import sweeps
from tests.accounting.samplers.test_registry import NAME, RULES, WHOLE
from tests.sampler_fields import may_register
from trainer.cli.audit_commands import audit_command
from trainer.cli.commands import account

ASKED = (
    "--num-examples=60", "--batch-size=30", "--delta=1e-3", f"--sampler={NAME}",
)  # fmt: skip


def test_a_sampler_from_outside_is_a_choice_of_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = CliRunner().invoke
    for command in (plan_command, account, audit_command):
        refused = run(command, [*ASKED, "--epochs=1", "--noise-multiplier=2"])
        assert f"'{NAME}' is not one of 'deterministic'" in refused.output
        assert refused.exit_code == 2
    may_register(monkeypatch)
    sampler_registry.register(NAME, RULES, WHOLE)
    assert f"|{NAME}]" in run(account, ["--help"]).output
    said = run(account, [*ASKED, "--num-steps=2", "--noise-multiplier=2", "--json"])
    fields = json.loads(said.output)
    assert fields["theorem"] == "the coins are revealed"
    planned = run(plan_command, [*ASKED, "--epochs=1", "--epsilon=3", "--json"])
    assert NAME in planned.output, planned.exception
    assert NAME in sweeps.default_samplers()
