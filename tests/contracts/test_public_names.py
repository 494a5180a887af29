"""Guarantees of ``dpsgd``, from which users import."""

from __future__ import annotations

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import dpsgd
from tests.contracts.test_imports import FRAMEWORKS, HEAVY, loaded


def test_a_type_checker_sees_every_name(root: pathlib.Path) -> None:
    tree = ast.parse((root / "dpsgd" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            # Without `as`, a type checker takes the name for a private one.
            assert alias.asname == alias.name
            assert dpsgd._HOMES[alias.name] == node.module


@pytest.mark.parametrize("name", sorted(dpsgd._HOMES))
def test_every_public_name_is_that_of_its_home(name: str) -> None:
    home = importlib.import_module(dpsgd._HOMES[name])
    found = getattr(dpsgd, name)
    assert found is getattr(home, name)
    assert name in dpsgd.__all__
    assert name in dir(dpsgd)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        dpsgd.no_such_name  # noqa: B018


def test_a_name_loads_only_what_it_needs(root: pathlib.Path) -> None:
    rules = (
        (HEAVY - {"numpy"}, "DpSgdPlan, InputError, accountant"),
        (FRAMEWORKS | {"pyarrow", "scipy"}, "read_batches, read_manifest, verify"),
        (FRAMEWORKS, "TrainSettings, account"),
        (FRAMEWORKS, "predict"),
        (FRAMEWORKS - {"apache_beam"}, "PoissonBatches, make_batches"),
    )
    lines = [(forbidden, [f"from dpsgd import {names}"]) for forbidden, names in rules]
    assert not loaded(root, *lines)


def test_a_command_without_a_package_ends_in_one_line(root: pathlib.Path) -> None:
    code = (
        "sys.argv = ['dpsgd', 'plan', '--num-examples=1000', '--batch-size=10',"
        " '--epochs=1', '--epsilon=1', '--delta=1e-6'];"
        " from dpsgd.command_line import main; main()"
    )
    status, last = without(root, "scipy", code)
    assert status == 2
    assert last.startswith("error: Expected the package scipy")
    assert "pip install '.[train]'" in last


def without(root: pathlib.Path, package: str, code: str) -> tuple[int, str]:
    """Exit status and last line of errors of ``code`` where a package is missing."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None; {code}"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.strip().splitlines()[-1]
