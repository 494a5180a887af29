"""What an option or a command that does not exist is answered with."""

from __future__ import annotations

import logging
import re
import shlex
import sys

import click
import pytest

import dpsgd
from accounting.cli import misspelt
from dpsgd.command_line import COMMANDS, cli

CONTEXTS = {
    name: click.Context(command, info_name=name)
    for name in COMMANDS
    if (command := cli.get_command(click.Context(cli), name)) is not None
}


def options_of(name: str) -> set[str]:
    params = CONTEXTS[name].command.get_params(CONTEXTS[name])
    return {option for param in params for option in param.opts}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train --data batches --out run", "Did you mean --batches?"),
        ("batches --data data --out new --batch-size 8", "Did you mean --input?"),
        ("prepare --data=a.csv", "Did you mean --input?"),
        ("compare --data data/train", "Did you mean --input?"),
        ("verify --data data", "Did you mean --input?"),
        ("schema a.csv --target income", "Did you mean --label?"),
        ("schema --data a.csv", "Give TABLE without an option: dpsgd schema TABLE."),
        ("train --target income", "`dpsgd schema --label` chooses the label."),
        ("plan --n 1000", "Did you mean --num-examples?"),
        ("plan --sigma 1", "Did you mean --noise-multiplier?"),
        ("synth --n 1000", "Did you mean --rows?"),
        ("predict --model run", "Give RUN without an option: dpsgd predict RUN."),
        ("report --run run", "Give RUN without an option: dpsgd report RUN."),
        ("account --epsilon 3", "`dpsgd plan --epsilon` computes the noise for one."),
        ("account --eps=3", "`dpsgd plan --epsilon` computes the noise for one."),
        ("train --model_ my:model", "Did you mean --model?"),
        ("train --bam-radus 1", "Did you mean --bam-radius?"),
        ("train --batch_size 8", "`dpsgd batches --batch-size`"),
        ("train --seed 1", "--init-seed is of initial weights"),
        ("eval run", "`dpsgd evaluate` evaluates; `dpsgd predict` predicts"),
    ],
)
def test_a_useful_answer_in_one_line(
    line: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "argv", ["dpsgd", *shlex.split(line)])
    with pytest.raises(SystemExit) as ended:
        dpsgd.main()
    assert ended.value.code == 2
    [answer] = capfd.readouterr().err.splitlines()
    assert says in answer


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_suggested_exists(command: str) -> None:
    for word in misspelt._CALLED:
        said = misspelt.meant(f"--{word}", CONTEXTS[command])
        for option in re.findall(r"Did you mean (--[a-z0-9-]+)\?", said):
            assert option in options_of(command)
        for other, option in re.findall(r"`dpsgd ([a-z]+)[A-Z ]*(--[a-z-]+)?", said):
            assert not option or option in options_of(other)
        assert "--delta" not in said


def test_only_what_a_command_lacks_is_answered_elsewhere() -> None:
    for command, option in misspelt._ELSEWHERE:
        assert option not in options_of(command)
    assert not set(misspelt._COMMANDS) & set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_hidden_option_is_suggested(command: str) -> None:
    params = CONTEXTS[command].command.get_params(CONTEXTS[command])
    hidden = [p.opts[0] for p in params if getattr(p, "hidden", False)]
    for option in hidden:
        assert option not in misspelt.meant(f"{option}x", CONTEXTS[command])
