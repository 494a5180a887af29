"""``dpsgd audit`` on the command line: verdicts, exit codes and refusals."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from accounting.auditing.residuals import Check
from accounting.core import accountant
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from tests.trainer.conftest import write_run_folder
from tests.warm_processes import warm_python
from trainer.auditing import audit_training
from trainer.auditing.audit_report import cannot_see
from trainer.auditing.audit_training import Outcome
from trainer.cli.audit_commands import audit_command

PLAN = (
    "--num-examples=400", "--batch-size=20", "--epochs=1", "--delta=1e-5",
    "--confidence=0.999999",
)  # fmt: skip


def _audit(*arguments: str) -> Result:
    return CliRunner().invoke(audit_command, list(arguments))


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


def test_a_refuted_claim_is_drawn_and_its_exit_code_reaches_the_shell(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Missed with a probability below 1e-6: it is found by over five deviations."""
    picture = tmp_path / "audit.png"
    command = [
        warm_python(), "-m", "dpsgd", "audit", "--sampler=deterministic",
        "--claim=poisson", *PLAN, "--noise-multiplier=0.5", "--trials=1500",
        f"--plot={picture}",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "verdict: VIOLATED" in done.stdout
    assert "claimed, by the accounting of poisson: epsilon <= " in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


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
    assert fields["cannot_see"] == list(cannot_see("mechanism", of_users=False))
    assert fields["claim"]["noise_multiplier"] == 1.5
    assert fields["claim"]["delta"] == 1e-3
    assert "sampler" in _error(str(run), "--sampler=poisson")
    code, fields = _json(str(run), "--trials=200", "--delta=1e-4", "--claim=poisson")
    assert fields["claim"]["delta"] == 1e-4
    assert fields["claim"]["plan"]["sampler"] == "poisson"


def _carry_out_without(fault: str | None) -> Any:
    """Returns made-up small runs in which ghosts and canaries look alike."""
    bad = Check(name="noise of something", expected=1.0, worst=0.5, p_value=1e-9)

    def carry_out(small: audit_training.SmallRun) -> Outcome:
        plan = DpSgdPlan(
            sampler="truncated-poisson",
            num_examples=small.num_canaries,
            expected_batch_size=small.num_canaries // 8,
            num_steps=8,
            truncated_batch_size=small.num_canaries // 4,
        )
        count = small.num_canaries // 2 if small.has_trials else 0
        tells = float(fault == "trials" and small.embedding_noise == "lazy")
        good = dataclasses.replace(bad, worst=1.0, p_value=0.5)
        check = bad if fault == "checks" and not small.has_trials else good
        return Outcome(
            run=small,
            plan=plan,
            real=np.full(count, tells),
            ghost=np.zeros(count),
            checks=[check],
        )

    return carry_out


def test_trainer_trials_are_held_against_the_small_runs_claim(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of lazy noise that tell canaries from ghosts are found."""
    asked = []
    carry_out = _carry_out_without("trials")

    def carried_out(small: audit_training.SmallRun) -> Outcome:
        asked.append(small)
        return carry_out(small)

    monkeypatch.setattr(audit_training, "carry_out", carried_out)
    code, fields = _json(str(run), "--level=trainer", "--trials=5000")
    assert code == 1
    assert fields["violated"]
    assert fields["verdict"].startswith("VIOLATED: epsilon is at least")
    assert fields["trials"] == 8192
    assert fields["confidence"] == 0.999
    assert fields["cannot_see"] == list(cannot_see("trainer", of_users=False))
    assert fields["claim"]["plan"]["num_examples"] == 4096
    assert "n=4,096, b=512, T=8" in fields["notes"][0]
    assert [(one["name"], one["violated"]) for one in fields["runs"]] == [
        ("dense", False), ("lazy", True), ("dense, few", False), ("lazy, few", False),
    ]  # fmt: skip
    assert [small.name for small in asked] == [one["name"] for one in fields["runs"]]
    assert {small.l2_norm_clip for small in asked} == {4.0}
    assert {small.noise_multiplier for small in asked} == {1.5}


def test_a_check_that_is_refuted_is_shown_and_exits_with_one(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_training, "carry_out", _carry_out_without("checks"))
    result = _audit(str(run), "--level=trainer")
    assert result.exit_code == 1
    assert "VIOLATED: this is not the mechanism" in result.stdout
    assert result.stdout.count("! 0.5") == 2  # of few canaries, dense and lazy
    monkeypatch.setattr(audit_training, "carry_out", _carry_out_without(None))
    result = _audit(str(run), "--level=trainer")
    assert result.exit_code == 0
    assert "verdict: consistent" in result.stdout
    assert "! 0.5" not in result.stdout


def test_an_audit_says_what_it_cannot_see_and_that_a_run_is_simulated(
    tmp_path: pathlib.Path,
    small_batches: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = "expected_batch_size=4096, noise_multiplier=2.5"
    run = write_run_folder(tmp_path / "run", small_batches, simulates=told)
    monkeypatch.setattr(audit_training, "carry_out", _carry_out_without(None))
    result = _audit(str(run), "--level=trainer")
    assert f"note: this run simulates {told} with smaller batches" in result.stderr
    assert "An audit of this kind cannot see:" in result.stdout
    unseen = cannot_see("trainer", of_users=False)
    assert len(unseen) > 3
    for fault in unseen:
        assert f"  - {fault}\n" in result.stdout
