"""The page for reviewers names every claim, and files and functions that exist."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

from accounting.core import claim
from trainer.core import claim_names

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reviewing.md").read_text(encoding="utf-8")
CLAIMS = {*claim_names.CLAIMS, *claim.RELIANCES}
CLAIMS -= {claim.BATCH_JOB, claim.BOUND_JOB}
MENTIONS = sorted(set(re.findall(r"`([\w/]+\.py(?:::[\w.]+)?)`", PAGE)))


def _names(path: pathlib.Path) -> set[str]:
    """The functions and classes of a module, and the methods of its classes."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


def test_it_names_every_module_of_the_cores() -> None:
    """Seen to fail: it left out who checks the order of the records."""
    modules = {
        str(path.relative_to(ROOT))
        for package in ("accounting", "pipelines", "trainer")
        for path in (ROOT / package / "core").rglob("*.py")
    }
    assert {m for m in modules if not m.endswith("__init__.py")} <= set(MENTIONS)


@pytest.mark.parametrize("mention", MENTIONS)
def test_a_file_and_a_function_that_it_names_exist(mention: str) -> None:
    file, _, name = mention.partition("::")
    assert (ROOT / file).is_file()
    assert not name or name in _names(ROOT / file)


@pytest.mark.parametrize("claim", sorted(CLAIMS))
def test_every_claim_has_a_row_with_a_test_against_the_core(claim: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {claim} |"))
    assert re.search(r"`tests/[\w/]+\.py::test_\w+`", row.split("|")[3])


def test_no_claim_is_unknown_to_it() -> None:
    table = PAGE.partition("## Claims")[2].partition("## Two walks")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    assert set(rows) - {"claim", "---"} == CLAIMS
