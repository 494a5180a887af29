"""What the code owes its readers: short functions, documented contracts, real names."""

from __future__ import annotations

import ast
import doctest
import importlib
import pathlib
from collections.abc import Iterator

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


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def body_lines(node: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    documented = ast.get_docstring(node, clean=False)
    first = node.body[0]
    skipped = first.end_lineno - first.lineno + 1 if documented else 0
    return node.end_lineno - node.lineno + 1 - skipped


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_functions_are_short_and_public_ones_documented(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in functions(tree):
        assert body_lines(node) <= 60, f"{node.name} is too long"
    public = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
    ]
    for node in public:
        assert ast.get_docstring(node), f"{node.name} has no docstring"


FOLDERS = sorted({path.parent for path in SOURCES if path.name == "__init__.py"})


# What `dpsgd` imports, and when, is the subject of test_public_names.
INERT = [folder for folder in FOLDERS if folder.name != "dpsgd"]


@pytest.mark.parametrize("folder", INERT, ids=lambda path: path.name)
def test_package_init_imports_nothing(folder: pathlib.Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text())
    assert all(isinstance(node, ast.Expr) for node in tree.body)


@pytest.mark.parametrize("path", DOCTESTED, ids=lambda path: path.stem)
def test_docstring_examples_run(path: pathlib.Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted == num_examples(path)
    assert result.failed == 0


SHARED_FLAGS = {
    "--allow-large-delta", "--batch-size", "--batches", "--data-is-public", "--delta",
    "--epochs", "--epsilon", "--eval", "--json", "--key-file",
    "--l2-norm-clip", "--max-examples-per-user", "--memory-limit", "--method",
    "--noise-multiplier", "--num-examples", "--num-steps", "--plot",
    "--relation", "--runner", "--sample", "--sampler", "--threads", "--user-column",
}  # fmt: skip
COMMAND_MODULES = [path for path in SOURCES if "cli" in path.parts]


def declared_flags(path: pathlib.Path) -> list[str]:
    """Flags that a module declares, by ``click.option`` or for others to add."""
    return [
        word.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("option", "_declared", "partial"))
        for word in node.args
        if isinstance(word, ast.Constant) and str(word.value).startswith("--")
    ]


def test_a_flag_that_commands_share_is_declared_once() -> None:
    declared = [flag for path in COMMAND_MODULES for flag in declared_flags(path)]
    assert all(declared.count(flag) == 1 for flag in SHARED_FLAGS), declared


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
