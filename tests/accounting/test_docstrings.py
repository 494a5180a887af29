"""What every public function of the accountant says of its arguments."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "accounting"
#: Where the arguments stand: here, or in the docstring of another function.
SAID = ("Args:", "rguments as for `", "rguments as there", "see `")


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Functions, and methods of classes, of names without an underscore."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def arguments(function: ast.FunctionDef) -> list[str]:
    """Names of the arguments, but for ``self`` and ``cls``."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


@pytest.mark.parametrize(
    "path",
    sorted(PACKAGE.rglob("*.py")),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_two_arguments_or_more_are_described(path: pathlib.Path) -> None:
    for function in public(ast.parse(path.read_text()).body):
        said = ast.get_docstring(function) or ""
        names = arguments(function)
        if len(names) < 2:
            continue
        assert any(words in said for words in SAID), function.name
        if "Args:" in said and "rguments as for `" not in said:
            missing = [one for one in names if not re.search(rf"\b{one}[:,]", said)]
            assert not missing, (function.name, missing)
