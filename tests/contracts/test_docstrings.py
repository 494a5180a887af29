"""Every public function of two arguments or more describes each of them.

It does so under ``Args:``, or refers to a function that does: arguments as for `f`, see
`f`.  Methods of private classes count, too; functions inside of functions do not.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("accounting", "dpsgd", "pipelines", "trainer")
FILES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
#: A reference to what describes the arguments: a function, a class or its method.
REFERENCE = re.compile(r"(?:rguments as (?:for|of)|\b[Ss]ee|[Aa]s for) `+([\w.]+)`+")
#: Libraries with documentation of their own.
ELSEWHERE = ("click.", "keras.")


def functions(
    body: list[ast.stmt], of_class: str = ""
) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Names, with their class, and definitions of functions and methods."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{node.name}.")
        if isinstance(node, ast.FunctionDef) and not is_command(node):
            yield of_class + node.name, node


def is_command(function: ast.FunctionDef) -> bool:
    """Whether the arguments are options, which describe themselves."""
    made = [ast.unparse(one) for one in function.decorator_list]
    return any("click." in one or one.startswith("experiment(") for one in made)


def arguments(function: ast.FunctionDef) -> list[str]:
    """Names of the arguments, without ``self`` and ``cls``."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


def described(function: ast.FunctionDef) -> set[str]:
    """Names of the arguments under ``Args:``."""
    _, _, text = (ast.get_docstring(function) or "").partition("Args:")
    return {one for one in arguments(function) if re.search(rf"\b{one}[:,]", text)}


@functools.cache
def descriptions() -> dict[str, set[str]]:
    """What functions describe, under their name, and with their class."""
    known: dict[str, set[str]] = {}
    for path in FILES:
        for name, function in functions(ast.parse(path.read_text()).body):
            for key in {name, function.name}:
                known.setdefault(key, set()).update(described(function))
    return known


def undescribed(function: ast.FunctionDef) -> set[str]:
    """Names of the arguments that nothing describes."""
    missing = set(arguments(function)) - described(function)
    text = ast.get_docstring(function) or ""
    references = REFERENCE.findall(text)
    for place in references:
        if place.startswith(ELSEWHERE):
            return set()
        parts = place.split(".")
        of_class = (f"{parts[-1]}.{function.name}", f"{parts[-1]}.__call__")
        for key in (".".join(parts[-2:]), parts[-1], *of_class):
            missing -= descriptions().get(key, set())
    # Beside a reference, the summary may describe what is particular.
    return {one for one in missing if not references or f"``{one}``" not in text}


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_two_arguments_or_more_are_described(path: pathlib.Path) -> None:
    for name, function in functions(ast.parse(path.read_text()).body):
        if not function.name.startswith("_") and len(arguments(function)) > 1:
            assert not undescribed(function), name
