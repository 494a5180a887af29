"""The locked versions that ``make`` installs: one lock for each supported Python.

That plain pip installs each of them is not tested here: it needs a network.
"""

from __future__ import annotations

import pathlib
import re
import runpy
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PYTHONS = ("3.11", "3.12", "3.13")

#: Locked also where setup.py limits no version: mkdocstrings requires it.
NEEDED_BY_OTHERS = {"pymdown-extensions"}


@pytest.fixture(scope="module")
def project(root: pathlib.Path) -> dict[str, Any]:
    """What setup.py tells setuptools."""
    told: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: told.update(arguments))
        runpy.run_path(str(root / "setup.py"))
    return told


def pins(lock: pathlib.Path) -> dict[str, str]:
    """Package -> locked version."""
    return dict(re.findall(r"^([\w-]+)==([^\s]+) \\$", lock.read_text(), re.MULTILINE))


def test_every_supported_python_has_a_lock(
    root: pathlib.Path, project: dict[str, Any]
) -> None:
    locks = {path.stem[2:] for path in (root / "deploy" / "lock").glob("py*.txt")}
    assert locks == set(PYTHONS)
    supported = SpecifierSet(project["python_requires"])
    assert set(supported.filter([f"3.{n}" for n in range(8, 16)])) == locks
    classified = [re.findall(r":: (3\.\d+)$", line) for line in project["classifiers"]]
    assert {version for found in classified for version in found} == locks
    makefile = (root / "Makefile").read_text()
    assert f"for version in {' '.join(PYTHONS)};" in makefile


@pytest.mark.parametrize("python", PYTHONS)
def test_a_lock_meets_what_setup_requires(
    root: pathlib.Path, project: dict[str, Any], python: str
) -> None:
    locked = pins(root / "deploy" / "lock" / f"py{python}.txt")
    wanted = [*project["install_requires"], *project["extras_require"]["all"]]
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate(
            {"python_version": python}
        ):
            assert requirement.name in NEEDED_BY_OTHERS or (
                requirement.name not in locked
            )
        else:
            assert locked[requirement.name] in requirement.specifier, requirement


def test_tensorflow_privacy_has_one_version(
    root: pathlib.Path, project: dict[str, Any]
) -> None:
    [pin] = pins(root / "deploy" / "lock" / "tensorflow-privacy.txt").items()
    [wanted] = [
        requirement
        for requirement in map(Requirement, project["extras_require"]["train"])
        if requirement.name == "tensorflow-privacy"
    ]
    assert pin == (wanted.name, str(wanted.specifier).removeprefix("=="))
