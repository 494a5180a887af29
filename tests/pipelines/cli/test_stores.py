"""A command that takes no path of a store refuses one, and writes nothing here."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest

from accounting.core.validation import InputError
from dpsgd.command_line import COMMANDS, cli
from pipelines.files.output_file import check_new, output_file
from pipelines.files.staged_folder import staged_folder
from tests.pipelines.conftest import Command

URL = "s3://bucket/name"

#: Options that take a path of a store, by command.
IN_STORES = {
    "batches": {"--input", "--out", "--key-file", "--scratch"},
    "compare": {"--input"},
    "prepare": {"--input"},
    "schema": {"TABLE"},
    "statistics": {"--input"},
    "train": {"--batches", "--out"},
    "tune": {"--input"},
    "verify": {"DIRECTORY", "--input", "--key-file"},
}
#: Options whose texts are no paths: columns, methods, titles; and a file that is read.
NO_PATHS = {
    "--aggregate", "--augment", "--bands", "--boolean", "--carry", "--category",
    "--classes", "--date", "--delimiter", "--drop", "--for", "--header",
    "--initial-weights", "--label", "--loss", "--metric", "--model", "--numeric",
    "--optimizer", "--or", "--range", "--runner", "--shift-by", "--split", "--text",
    "--title", "--together", "--train", "--truncated-batch-size", "--user",
    "--user-column",
}  # fmt: skip


def texts() -> Iterator[tuple[str, click.Parameter]]:
    """Yields every option and argument that takes any text."""
    ctx = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(ctx, name)
        assert command is not None
        for param in command.get_params(click.Context(command, info_name=name)):
            is_text = param.type is click.STRING or isinstance(param.type, click.Path)
            if is_text and not NO_PATHS & set(param.opts):
                yield name, param


def name_of(param: click.Parameter) -> str:
    is_option = isinstance(param, click.Option)
    return param.opts[0] if is_option else param.human_readable_name


@pytest.mark.parametrize(
    ("command", "param"), [pytest.param(*each, id=str(each[1])) for each in texts()]
)
def test_every_path_is_refused_in_a_store_or_named_as_taken(
    command: str, param: click.Parameter
) -> None:
    ctx = click.Context(click.Command(command))
    if name_of(param) in IN_STORES.get(command, ()):
        assert param.type.convert(URL, param, ctx) == URL
        return
    with pytest.raises(InputError, match=re.escape(f"{name_of(param)} {URL}")):
        param.type.convert(URL, param, ctx)


@pytest.mark.parametrize(
    "name",
    sorted({name for name, param in texts() if "--out" in param.opts} - {*IN_STORES}),
)
def test_nothing_is_written_here_for_a_store(
    name: str, command: Command, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = command(name, "--out", URL)
    assert ran.code == 2
    assert URL in ran.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [check_new, output_file, staged_folder])
def test_python_is_refused_too(
    write: Callable[[str], Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(InputError, match=f"--out {URL}"),
        contextlib.ExitStack() as used,
    ):
        used.enter_context(write(URL))
    assert not list(tmp_path.iterdir())
