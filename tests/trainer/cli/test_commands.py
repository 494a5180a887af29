"""The command line: imports, output and errors."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import signal
import subprocess
import sys
from statistics import NormalDist
from typing import Any

import pytest

import dpsgd
from accounting.core import accountant
from accounting.core.intervals import upper_text
from accounting.core.validation import InputError
from dpsgd import command_line
from pipelines.batches.folder import read_manifest
from tests.command_line import Result, invoke
from tests.contracts.test_imports import FRAMEWORKS, loaded
from tests.trainer.conftest import write_run_folder
from tests.trainer.run.whole_runs import LINEAR
from trainer.cli import account_body

pytestmark = pytest.mark.usefixtures("lean_results")

ROOT = pathlib.Path(__file__).parents[3]
PLAN = [
    "--sampler=poisson", "--num-examples=60000", "--batch-size=600",
    "--noise-multiplier=1.1", "--delta=1e-5",
]  # fmt: skip
#: A third of the time of a cross-check.
NOISY = [*PLAN, "--noise-multiplier=2.2"]

USERS = ["--max-examples-per-user=2"]


def _call(command: str, *arguments: str) -> Result:
    return invoke([command, *arguments])


def _error(command: str, *arguments: str) -> str:
    result = _call(command, *arguments)
    assert isinstance(result.exception, InputError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.fixture
def run(tmp_path: pathlib.Path, small_batches: Any) -> pathlib.Path:
    return write_run_folder(tmp_path / "run", small_batches)


def test_plan_and_account_load_neither_tensorflow_nor_beam(run: pathlib.Path) -> None:
    plan = "--num-examples=10000 --batch-size=100 --epochs=1 --delta=1e-6"
    lines = [
        f"dpsgd account {plan} --sampler=poisson --noise-multiplier=0.5",
        f"dpsgd plan {plan} --epsilon=5 --sampler=truncated-poisson",
        f"dpsgd account {run}",
    ]
    assert not loaded(ROOT, (FRAMEWORKS, lines))


def test_account_states_the_epsilon_of_what_was_executed(run: pathlib.Path) -> None:
    found = json.loads(_call("account", str(run), "--json").output)
    plan = read_manifest(run).plan
    wanted = accountant.epsilon(plan, noise_multiplier=1.5, delta=1e-3).guarantee
    assert found["epsilon"] == pytest.approx(wanted, rel=1e-9)
    assert found["delta"] == 1e-3
    other = json.loads(_call("account", str(run), "--delta=1e-5", "--json").output)
    assert other["epsilon"] > found["epsilon"]
    assert "REPLACE_SPECIAL" in _call("account", str(run)).output


def test_account_answers_for_other_relations_and_users_of_a_run(
    run: pathlib.Path,
) -> None:
    plan = read_manifest(run).plan
    noise = {"noise_multiplier": 1.5, "delta": 1e-3}
    found = json.loads(_call("account", str(run), *USERS, "--json").output)
    wanted = accountant.epsilon(plan, max_examples_per_user=2, **noise).guarantee
    assert found["epsilon"] == pytest.approx(wanted, rel=1e-9)
    assert found["privacy_unit"].startswith("one user")
    added = "ADD_OR_REMOVE_ONE"
    found = json.loads(
        _call("account", str(run), f"--relation={added}", "--json").output
    )
    wanted = accountant.epsilon(plan, neighboring_relation=added, **noise).guarantee
    assert found["epsilon"] == pytest.approx(wanted, rel=1e-9)
    assert found["neighboring_relation"] == added


@pytest.fixture
def other(tmp_path: pathlib.Path, small_batches: Any) -> pathlib.Path:
    """A run like ``run``, on batches by another key."""
    manifest = dataclasses.replace(small_batches.manifest, batches_id="f" * 32)
    batches = dataclasses.replace(small_batches, manifest=manifest)
    return write_run_folder(tmp_path / "other", batches, key_name="1" * 32)


def test_account_adds_the_epsilons_and_deltas_of_several_runs(
    run: pathlib.Path, other: pathlib.Path
) -> None:
    alone = json.loads(_call("account", str(run), "--json").output)
    found = json.loads(_call("account", str(run), str(other), "--json").output)
    assert (found["epsilon"], found["delta"]) == (2 * alone["epsilon"], 2e-3)
    assert found["runs"] == {str(run): alone, str(other): alone}
    total = upper_text(2 * alone["epsilon"])
    assert f"These 2 runs together are ({total}, 0.002)" in found["claim"]
    both = (str(run), str(other))
    text = _call("account", *both).output
    assert found["claim"] in " ".join(text.split())
    for each in both:  # with what it relies on, and does not cover
        assert f"{each}\n{_call('account', each).output}" in text
    lower = json.loads(_call("account", *both, "--delta=1e-5", "--json").output)
    assert lower["delta"] == 2e-5


def test_account_refuses_what_does_not_add(
    run: pathlib.Path,
    other: pathlib.Path,
    small_batches: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = write_run_folder(run.parent / "same", small_batches)
    assert "of its own for each run" in _error("account", *map(str, (run, other, same)))
    layout = dataclasses.replace(small_batches.manifest, batches_id="e" * 32)
    layout = dataclasses.replace(small_batches, manifest=layout)
    again = write_run_folder(run.parent / "again", layout, key_name="1" * 32)
    assert "or their key" in _error("account", *map(str, (other, again)))
    assert "each run once" in _error("account", str(run), f"{run}/../{run.name}")
    both = (str(run), str(other))
    assert "Expected delta=0.012 < 0.01" in _error("account", *both, "--delta=0.006")
    assert "several runs: they are of one" in _error("account", *both, "--trade-off")
    of_run = account_body.of_run

    def second(changes: dict[str, Any]) -> Any:
        def answer(path: pathlib.Path, *more: Any) -> Any:
            fields, text = of_run(path, *more)
            return ({**fields, **changes} if path == other else fields), text

        return answer

    monkeypatch.setattr(account_body, "of_run", second({"privacy_unit": "a user"}))
    assert "Expected runs of one privacy unit" in _error("account", *both)
    monkeypatch.setattr(account_body, "of_run", second({"is_guarantee": False}))
    assert "together with it nothing is proven" in _error("account", *both)


def test_account_refuses_a_run_that_is_not_finished(
    tmp_path: pathlib.Path, small_batches: Any
) -> None:
    """Seen to fail: `dpsgd.account` stated what a run would have at its end."""
    run = write_run_folder(tmp_path / "run", small_batches, complete=False)
    assert "a finished run" in _error("account", str(run))
    with pytest.raises(InputError, match="a finished run"):
        dpsgd.account(run)


def test_account_prints_the_epsilon_of_dp_accounting_beside_ours() -> None:
    plain = json.loads(_call("account", *NOISY, "--epochs=1", "--json").output)
    steps = ("--num-steps=100", "--cross-check")
    found = json.loads(_call("account", *NOISY, *steps, "--json").output)
    opinion = found.pop("cross_check")
    assert found == plain
    assert opinion["epsilon"] == pytest.approx(found["epsilon"], rel=2e-3)
    assert opinion["source"].startswith("dp-accounting ")
    text = _call("account", *NOISY, *steps).output
    assert f"epsilon {opinion['epsilon']:.6g} of {opinion['event']}" in text


def test_account_prints_the_trade_off_and_rounds_mu_up() -> None:
    """Three epochs at noise 1.1: 1.5745916-GDP, whose best tests are known."""
    asked = (*PLAN[1:], "--sampler=deterministic", "--epochs=3", "--trade-off")
    found = json.loads(_call("account", *asked, "--json").output)
    tests = {
        test["false_positive_rate"]: test["true_positive_rate_at_most"]
        for test in found["trade_off"]["tests"]
    }
    [stated] = [
        test["true_positive_rate_at_most"]
        for test in found["attacks"]["tests"]
        if test["false_positive_rate"] == 0.01
    ]
    assert 0.01 < tests[0.01] <= stated * (1 + 1e-9)
    text = _call("account", *asked).output
    assert f"1 % -> {math.ceil(1000 * tests[0.01]) / 10:g} %" in text
    assert "at most; 1.5746-GDP" in text
    normal, shown = NormalDist(), re.findall(r"^ +(\S+) % -> (\S+) %$", text, re.M)
    assert len(shown) == len(tests)
    for rate, most in shown[1:-1]:  # as they are printed
        best = normal.cdf(normal.inv_cdf(float(rate) / 100) + math.sqrt(3) / 1.1)
        assert 100 * best <= float(most)


def test_train_refuses_before_tensorflow_is_loaded(
    tmp_path: pathlib.Path, small_batches: Any, held_out: pathlib.Path
) -> None:
    # A fresh process, since this one may have TensorFlow already.
    code = (
        "import json, sys\nfrom dpsgd.command_line import run\n"
        "from accounting.core.validation import InputError\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    try:\n        run(arguments)\n"
        "    except InputError as error:\n        print(error)\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    file = tmp_path / "file"
    file.write_text("mine")
    common = [
        "train", f"--batches={small_batches.path}", f"--eval={held_out}",
        f"--out={tmp_path / 'run'}", "--l2-norm-clip=1",
    ]  # fmt: skip
    noisy = [*common, "--noise-multiplier=1"]
    calls = (
        (common, "--epsilon"),
        ([*common, "--noise-multiplier=-1"], "noise_multiplier=-1"),
        ([*noisy, f"--eval={tmp_path}"], "parquet"),
        ([*noisy, f"--out={file}/run"], "Not a directory"),
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([call for call, _ in calls])],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line, (_, message) in zip(done.stdout.splitlines(), calls, strict=True):
        assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("number", "signals"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)]
)
def test_a_stopped_run_tells_its_signal_and_goes_on(
    tmp_path: pathlib.Path,
    small_batches: Any,
    held_out: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    signals: int,
) -> None:
    """After one signal it ends after the next step; after two, immediately."""
    from trainer.report.progress import Terminal

    def stop_at_three(_: Terminal, done: int) -> None:
        for _ in range(signals if done == 3 else 0):
            signal.raise_signal(number)

    arguments = [
        "dpsgd", "train", f"--batches={small_batches.path}", f"--eval={held_out}",
        f"--out={tmp_path / 'run'}", "--l2-norm-clip=1", "--noise-multiplier=1",
        f"--model={LINEAR}", "--checkpoint-every=1",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "advance", stop_at_three)
        with pytest.raises(SystemExit) as end:
            command_line.main()
    assert end.value.code == 128 + number
    errors = capfd.readouterr().err.splitlines()
    assert errors[-1].startswith("error: Stopped")
    assert errors[-1].endswith("or run the same cell, to continue.")
    assert ("after step 4 of 10" in errors[-1]) == (signals == 1)
    assert not any("Traceback" in line for line in errors)
    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert not end.value.code
    done = 4 if signals == 1 else 2  # the third was not committed yet
    assert f"continuing after step {done}" in capfd.readouterr().err
