"""Faults in the cores that a test must catch.

``planted_faults.toml`` lists them.  A fault is one replacement in one file, and the
tests of which at least one must fail with it.  A change that moves code moves its
faults along; one that removes a mechanism removes them.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[2]
FILE = pathlib.Path(__file__).with_name("planted_faults.toml")
#: Exit status of pytest: some tests failed, and all could be run.
_FAILED = 1


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong replacement.

    Attributes:
      name: What is wrong, in words.
      file: Path in the tree.
      text: What stands there, exactly once.
      wrong: What is planted in its place.
      tests: Pytest's names of the tests that must catch it.
    """

    name: str
    file: str
    text: str
    wrong: str
    tests: list[str]


def every() -> list[Fault]:
    """Returns all faults."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return [Fault(**fields) for fields in table["fault"]]


def chosen(names: Iterable[str]) -> list[Fault]:
    """Returns the faults of the names, or all if there are none."""
    wanted = set(names)
    return [fault for fault in every() if not wanted or fault.name in wanted]


def planted(fault: Fault, source: str) -> str:
    """Returns the source of a file with the fault.

    Args:
      fault: What to plant.
      source: The file as it is.

    Raises:
      ValueError: the text does not stand there exactly once.
    """
    if source.count(fault.text) != 1:
        raise ValueError(f"{fault.file} has it {source.count(fault.text)} times")
    return source.replace(fault.text, fault.wrong)


def _copy(folder: pathlib.Path) -> None:
    """Copies what git would commit."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def replay(fault: Fault) -> str | None:
    """Plants a fault in a copy of the tree; returns None if its tests catch it.

    Args:
      fault: What to plant.
    """
    with tempfile.TemporaryDirectory() as temporary:
        tree = pathlib.Path(temporary)
        _copy(tree)
        path = tree / fault.file
        try:
            path.write_text(planted(fault, path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            return f"not planted: {error}"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *fault.tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": temporary},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode == _FAILED:
        return None
    last = done.stdout.strip().splitlines()[-1:]
    return f"NOT caught, pytest exited {done.returncode}: {' '.join(last)}"
