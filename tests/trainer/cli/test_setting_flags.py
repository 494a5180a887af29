"""A setting that is declared once is everywhere."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import click
import pytest
from click.testing import CliRunner

from accounting.cli.grouped import Grouped
from accounting.core.validation import InputError
from dpsgd.command_line import COMMANDS, cli
from dpsgd.command_reference import reference
from trainer.cli import commands
from trainer.cli.commands import train_command, train_request
from trainer.core.run import run_record
from trainer.settings.setting import setting
from trainer.settings.train_settings import TrainSettings

NEEDED = ["--batches=b", "--eval=e", "--out=o", "--noise-multiplier=1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy(TrainSettings):
    """Settings of training, and one more.

    Attributes:
      toy_share: A share of toys, of which
        there are many.
    """

    toy_share: float = setting(0.25, above=0, at_most=1, recorded=True)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "TrainSettings", Toy)


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
    text = " ".join(CliRunner().invoke(train_command, ["--help"]).output.split())
    said = "A share of toys, of which there are many."
    assert f"--toy-share FLOAT {said} [default: 0.25]" in text
    assert f"- `--toy-share FLOAT`: {said}  \\[default: 0.25" in reference()
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
    done = CliRunner().invoke(
        train_command,
        [f"--batches={small_batches.path}", f"--eval={held_out}", f"--out={run}",
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
        ("learning_rte = 0.1", "sets learning_rte.*Did you mean learning_rate"),
        ("config = 'other.toml'", "sets config"),
        ("learning_rate = ", "not readable as TOML"),
        ("learning_rate = 'high'", "'high' is not a valid float"),
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


def test_several_values_are_parsed_one_by_one() -> None:
    assert train_request([*NEEDED, "--hidden=8,4"]).settings.hidden == (8, 4)
    with pytest.raises(InputError, match="'a' is not a valid int"):
        train_request([*NEEDED, "--hidden=8,a"])


def test_help_and_reference_have_every_option_once_and_in_groups() -> None:
    sections = dict(
        part.split("\n", 1) for part in f"\n{reference()}".split("\n## dpsgd ")[1:]
    )
    assert list(sections) == list(COMMANDS)
    with click.Context(cli, info_name="dpsgd") as ctx:
        for name, text in sections.items():
            command = cli.get_command(ctx, name)
            assert isinstance(command, Grouped), name
            printed = command.get_help(click.Context(command, info_name=name))
            assert printed.count("\nOutput:\n") == 1
            for param in command.get_params(ctx):
                if isinstance(param, click.Option):
                    assert text.count(f"- `{param.opts[0]}") >= 1
                    assert f"  {param.opts[0]}" in printed
