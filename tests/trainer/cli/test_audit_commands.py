"""``dpsgd audit`` on the command line: verdicts, exit codes and refusals."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import pytest

from accounting.core import accountant
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from tests.command_line import Result, invoke
from tests.trainer.conftest import write_run_folder
from tests.warm_processes import warm_python
from trainer.auditing import CANNOT_SEE

PLAN = (
    "--num-examples=400", "--batch-size=20", "--epochs=1", "--delta=1e-5",
    "--confidence=0.999999",
)  # fmt: skip


def _audit(*arguments: str) -> Result:
    return invoke(["audit", *arguments])


def _json(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = _audit(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, json.loads(result.stdout)


def _error(*arguments: str) -> str:
    result = _audit(*arguments)
    assert isinstance(result.exception, InputError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_a_true_claim_exits_with_zero() -> None:
    """Another exit code has probability at most 1e-6."""
    code, fields = _json(
        "--sampler=poisson", *PLAN, "--noise-multiplier=1", "--trials=600"
    )
    assert code == 0
    assert not fields["violated"]
    assert fields["verdict"].startswith("consistent")
    plan = DpSgdPlan(
        sampler="poisson", num_examples=400, expected_batch_size=20, num_steps=20
    )
    known = accountant.epsilon(plan, noise_multiplier=1.0, delta=1e-5).guarantee
    assert fields["claim"]["epsilon"] == known
    assert fields["audited"] == fields["claim"]["plan"] == plan.to_json()
    assert fields["trials"] == 600


def test_the_exit_code_of_a_refuted_claim_reaches_the_shell(root: pathlib.Path) -> None:
    """Missed with a probability below 1e-6: it is found by over five deviations."""
    command = [
        warm_python(), "-m", "dpsgd", "audit", "--sampler=deterministic",
        "--claim=poisson", *PLAN, "--noise-multiplier=0.5", "--trials=1500",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "verdict: VIOLATED" in done.stdout
    assert "claimed, by the accounting of poisson: epsilon <= " in done.stdout


@pytest.fixture
def run(tmp_path: pathlib.Path, small_batches: Any) -> pathlib.Path:
    return write_run_folder(tmp_path / "run", small_batches, l2_norm_clip=4.0)


def test_a_run_that_releases_something_else_is_refused(
    tmp_path: pathlib.Path, small_batches: Any
) -> None:
    run = write_run_folder(
        tmp_path / "mix",
        small_batches,
        method="model-mix",
        method_settings={"mix_width": 0.1, "linf_factor": 4},
    )
    assert "method='model-mix' to be one of dp-sgd, bam, dp-sat" in _error(str(run))


def test_a_run_is_audited_with_what_it_executed(
    run: pathlib.Path, small_batches: Any
) -> None:
    code, fields = _json(str(run), "--trials=200", "--confidence=0.999999")
    assert code == 0
    assert fields["audited"] == small_batches.manifest.plan.to_json()
    assert fields["cannot_see"] == list(CANNOT_SEE)
    assert fields["claim"]["noise_multiplier"] == 1.5
    assert fields["claim"]["delta"] == 1e-3
    assert "sampler" in _error(str(run), "--sampler=poisson")
    code, fields = _json(str(run), "--trials=200", "--delta=1e-4", "--claim=poisson")
    assert fields["claim"]["delta"] == 1e-4
    assert fields["claim"]["plan"]["sampler"] == "poisson"
