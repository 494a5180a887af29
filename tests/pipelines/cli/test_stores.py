"""A command that takes no path of a store refuses one, and writes nothing here."""

from __future__ import annotations

import contextlib
import pathlib
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cyclopts import Token
from cyclopts.argument import Argument

from accounting.cli.command import app_of
from accounting.core.validation import InputError
from dpsgd.command_line import COMMANDS, function_of
from pipelines.files.outputs import check_new, output_file, staged_folder

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
    "--average", "--claim", "--embedding-noise", "--learning-rate-schedule", "--method",
    "--relation", "--sampler", "--train-over", "--[KEYWORD]", "OTHERS", "REST",
    "--augment", "--bands", "--boolean", "--carry", "--category",
    "--classes", "--date", "--delimiter", "--drop", "--for", "--header",
    "--initial-weights", "--label", "--loss", "--metric", "--model", "--numeric",
    "--optimizer", "--or", "--range", "--runner", "--shift-by", "--split", "--text",
    "--title", "--together", "--train", "--truncated-batch-size", "--user",
    "--user-column",
}  # fmt: skip


def texts() -> Iterator[tuple[str, Argument]]:
    """Yields every option and argument that takes any text."""
    for name in COMMANDS:
        for each in app_of(function_of(name)).assemble_argument_collection():
            kinds = {each.hint, *typing.get_args(each.hint)}
            is_text = bool({str, pathlib.Path} & kinds) and each.parse
            if is_text and not NO_PATHS & {*each.names}:
                yield name, each


@pytest.mark.parametrize(
    ("command", "option"),
    [pytest.param(*each, id=f"{each[0]} {each[1].name}") for each in texts()],
)
def test_every_path_is_refused_in_a_store_or_named_as_taken(
    command: str, option: Argument
) -> None:
    convert = option.parameter.converter
    token = Token(keyword=option.name, value=URL)
    if {*option.names} & IN_STORES.get(command, set()):
        assert convert is None or convert(str, [token]) == URL
        return
    assert convert is not None
    with pytest.raises(InputError, match=re.escape(f"{option.name} {URL}")):
        convert(pathlib.Path, [token])


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
