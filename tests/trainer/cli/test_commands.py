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
from typing import Annotated, Any

import pytest
from cyclopts import Parameter

import dpsgd
from accounting.cli.command import names_of, resolved
from accounting.core import accountant
from accounting.core.intervals import upper_text
from accounting.core.settings import RECORDED, Field
from accounting.core.validation import InputError
from dpsgd import command_line
from dpsgd.command_line import COMMANDS, function_of, reference
from pipelines.batches.folder import read_manifest
from tests.command_line import Result, invoke
from tests.contracts.test_imports import FRAMEWORKS, loaded
from tests.trainer.conftest import write_run_folder
from tests.trainer.run.whole_runs import LINEAR
from trainer.cli import account_body, train_command
from trainer.cli.train_command import train_request
from trainer.settings.train_settings import TrainSettings

pytestmark = pytest.mark.usefixtures("lean_results")

ROOT = pathlib.Path(__file__).parents[3]
PLAN = [
    "--sampler=poisson", "--num-examples=60000", "--batch-size=600",
    "--noise-multiplier=1.1", "--delta=1e-5",
]  # fmt: skip
#: A third of the time of a cross-check.
NOISY = [*PLAN, "--noise-multiplier=2.2"]


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


@pytest.mark.thorough
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
    found = json.loads(
        _call("account", str(run), "--max-examples-per-user=2", "--json").output
    )
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


@pytest.mark.thorough
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


# -- a setting that is declared once is everywhere -------------------------------------


NEEDED = ["--batches=b", "--eval=e", "--out=o", "--noise-multiplier=1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy(TrainSettings):
    """Settings of training, and one more.

    Attributes:
      toy_share: A share of toys, of which
        there are many.
    """

    toy_share: Annotated[float, Field(gt=0, le=1), Parameter(), RECORDED] = 0.25


@resolved
@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyOptions(train_command.TrainOptions, Toy):
    """Settings as the command line gives them."""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "TrainSettings", Toy)
    monkeypatch.setattr(train_command, "TrainOptions", ToyOptions)


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "train.toml"
    path.write_text(
        'toy_share = 0.5\nhidden = [4, 2]\n"learning-rate" = 0.3\n'
        'export = ["upa"]\nkeep_last = 2\nevaluate_averages = true\ntail = 2\n'
    )
    return path


@pytest.mark.usefixtures("toy")
def test_one_declaration_is_in_help_reference_and_python() -> None:
    text = " ".join(invoke(["train", "--help"]).output.split())
    said = "A share of toys, of which there are many."
    assert f"--toy-share FLOAT {said} [default: 0.25]" in text
    assert f"- `--toy-share FLOAT`: {said} \\[default: 0.25" in reference()
    assert Toy(noise_multiplier=1.0).toy_share == 0.25
    with pytest.raises(InputError, match="toy_share=1"):
        Toy(noise_multiplier=1.0, toy_share=1.5)


@pytest.mark.usefixtures("toy")
def test_options_and_a_file_of_options_set_it(config: pathlib.Path) -> None:
    given = train_request([*NEEDED, "--toy-share=0.75"]).settings
    assert isinstance(given, Toy)
    assert given.toy_share == 0.75
    with pytest.raises(InputError, match="toy_share=2"):
        train_request([*NEEDED, "--toy-share=2"])
    read: Any = train_request([*NEEDED, f"--config={config}"]).settings
    assert (read.toy_share, read.learning_rate) == (0.5, 0.3)
    assert (read.hidden, read.export) == ((4, 2), ("upa",))
    assert read.evaluate_averages
    both: Any = train_request([*NEEDED, f"--config={config}", "--toy-share=1"])
    assert both.settings.toy_share == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte = 0.1", "learning.rte.*Did you mean --learning-rate"),
        ("learning_rate = ", "not readable as TOML"),
        ("learning_rate = 'high'", "learning.rate.*high"),
    ],
)
def test_a_wrong_file_of_options_is_refused_in_one_line(
    text: str, message: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "train.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        train_request([*NEEDED, f"--config={path}"])
    assert "\n" not in str(caught.value)


def test_help_and_reference_have_every_option_once_and_in_groups() -> None:
    sections = dict(
        part.split("\n", 1) for part in f"\n{reference()}".split("\n## dpsgd ")[1:]
    )
    assert list(sections) == list(COMMANDS)
    for name, text in sections.items():
        printed = invoke([name, "--help"]).stdout
        assert len(printed.splitlines()) <= 40, name
        assert printed.count("  dpsgd ") >= 2, name
        shown = re.findall(r"^  (?:[A-Z]+, )?(--[a-z-]+|[A-Z]+)", printed, re.M)
        assert len({*shown} - {"--json", "--config", "--table"}) <= 15, (name, shown)
        for option in names_of(function_of(name)):
            if option not in ("--[KEYWORD]", "--config"):
                assert text.count(f"`{option}") + text.count(f", {option}") >= 1
