"""A setting that is declared once is everywhere."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Annotated, Any

import pytest
from cyclopts import Parameter

from accounting.cli.command import names_of, resolved
from accounting.core.settings import RECORDED, Field
from accounting.core.validation import InputError
from dpsgd.command_line import COMMANDS, function_of, reference
from tests.command_line import invoke
from trainer.cli import train_command
from trainer.cli.train_command import train_request
from trainer.core.run import run_record
from trainer.settings.train_settings import TrainSettings

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


@pytest.mark.usefixtures("toy", "lean_results")
def test_the_record_of_a_run_has_it(
    tmp_path: pathlib.Path, small_batches: Any, held_out: pathlib.Path
) -> None:
    run = tmp_path / "run"
    done = invoke(
        ["train", f"--batches={small_batches.path}", f"--eval={held_out}",
         f"--out={run}",
         "--noise-multiplier=1", "--hidden=2", "--embedding-dim=2", "--toy-share=0.5"],
    )  # fmt: skip
    assert done.exception is None, done.output
    assert run_record.read_run(run)[0].optimizer["toy_share"] == 0.5
    commits = run / "private" / "checkpoints"
    first = json.loads((commits / "00000001.json").read_bytes())["public"]
    # A run that goes on has it unchanged.
    assert first["identity"]["settings"]["toy_share"] == 0.5


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
