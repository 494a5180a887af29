"""What the code owes its readers: short functions, documented contracts, real names."""

from __future__ import annotations

import ast
import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGES = ("accounting", "pipelines", "trainer")
SOURCES = [
    *sorted((ROOT / "dpsgd").glob("*.py")),
    *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))),
    *sorted((ROOT / "tests" / "engines" / "harness").glob("*.py")),
]


def num_examples(path: pathlib.Path) -> int:
    """How many examples the docstrings hold, but for those marked to be skipped."""
    if ">>>" not in (text := path.read_text()):
        return 0
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    parser = doctest.DocTestParser()
    return sum(
        doctest.SKIP not in example.options
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented)
        for example in parser.get_examples(ast.get_docstring(node) or "")
    )


DOCTESTED = [path for path in SOURCES if num_examples(path)]


@pytest.mark.parametrize("path", DOCTESTED, ids=lambda path: path.stem)
def test_docstring_examples_run(path: pathlib.Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted == num_examples(path)
    assert result.failed == 0


def test_one_version(root: pathlib.Path) -> None:
    import dpsgd

    setup = (root / "setup.py").read_text()
    assert f'version="{dpsgd.__version__}"' in setup
    changelog = (root / "CHANGELOG.md").read_text()
    assert f"## {dpsgd.__version__}" in changelog


def test_nothing_names_a_machine(root: pathlib.Path) -> None:
    """Paths of one developer's machine have no place in the project."""
    pages = [root / "README.md", root / "Makefile", *(root / "docs").glob("*.md")]
    for path in [*SOURCES, *pages]:
        text = path.read_text()
        for prefix in ("/" + "root/", "/" + "home/", "/" + "work/"):
            assert prefix not in text, f"{path.name} names {prefix}"
