"""What every public function says of its arguments."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("accounting", "dpsgd", "pipelines", "trainer")
#: Where the arguments stand: here, or in the docstring of another function.
SAID = ("Args:", "rguments as for `", "rguments as there", "see `", "See `")


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Functions, and methods of classes, of names without an underscore."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body)
        if (
            isinstance(node, ast.FunctionDef)
            and not node.name.startswith("_")
            and not is_command(node)
        ):
            yield node


def is_command(function: ast.FunctionDef) -> bool:
    """Whether the arguments are options, which say themselves what they are."""
    return any("click." in ast.unparse(one) for one in function.decorator_list)


def arguments(function: ast.FunctionDef) -> list[str]:
    """Names of the arguments, but for ``self`` and ``cls``."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


@pytest.mark.parametrize(
    "path",
    sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")),
    ids=lambda path: path.relative_to(ROOT).as_posix(),
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
