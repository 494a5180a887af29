"""The commands of a report give the epsilon of the report."""

from __future__ import annotations

import hashlib
import json
import shlex
from typing import Any

import pytest
from click.testing import CliRunner

import dpsgd
from accounting.plan import DpSgdPlan
from tests.trainer.html_report.conftest import PLAN
from trainer.html_report.facts import collect

SIZES = {"num_examples": 2000, "expected_batch_size": 100}
PLANS = [
    PLAN,
    DpSgdPlan(sampler="poisson", num_steps=50, num_epochs=1, **SIZES),
    DpSgdPlan(sampler="dynamic-shuffle", num_steps=40, num_epochs=2, **SIZES),
]
MIX = {
    "method": "model-mix",
    "method_settings": {"mix_width": 0.1, "linf_factor": 4},
}
LARGE = {"target_delta": 0.02}


@pytest.mark.parametrize(
    ("plan", "record"),
    [*((plan, {}) for plan in PLANS), (PLANS[1], MIX), (PLANS[1], LARGE)],
    ids=lambda value: getattr(value, "sampler", ""),
)
def test_anyone_finds_the_epsilon_of_the_report_without_the_run(
    make_run: Any, plan: DpSgdPlan, record: dict[str, Any]
) -> None:
    found = collect(make_run(plan=plan, **record))
    name, *arguments = shlex.split(found["commands"][0]["command"])
    assert name == "dpsgd"
    again = CliRunner().invoke(dpsgd.cli, [*arguments, "--json"])
    assert again.exit_code == 0, again.output
    stated = json.loads(again.stdout)
    for field in ("epsilon", "epsilon_lower_bound", "delta", "theorem"):
        assert stated[field] == found["privacy"]["statement"][field]


def test_the_commands_for_the_run_work_beside_it(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("my run")
    found = collect(run, delta=1e-7)
    monkeypatch.chdir(run.parent)
    lines = [shlex.split(each["command"]) for each in found["commands"]]
    [account] = [line for line in lines if line[1:] == account_of("my run")]
    done = CliRunner().invoke(dpsgd.cli, account[1:])
    assert done.output.splitlines()[0] == found["privacy"]["statement"]["claim"]
    assert ["dpsgd", "audit", "my run", "--delta", "1e-07"] in lines
    assert lines[-1] == ["sha256sum", "my run/run_record.json", "my run/manifest.json"]
    digest = hashlib.sha256((run / "manifest.json").read_bytes()).hexdigest()
    assert found["files"]["manifest.json"] == digest


def account_of(name: str) -> list[str]:
    return ["account", name, "--delta", "1e-07"]
