"""The files of a user's code, found in its source without running it."""

from __future__ import annotations

import pathlib
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator

import pytest

from accounting.core.validation import InputError
from trainer.model.user_sources import changed, check_function, digests

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """``write(file=text)``; two underscores stand for a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)

    def run(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    yield run
    assert set(sys.modules) == before, "source was run"


@pytest.mark.parametrize(
    "statement",
    [
        "import other",
        "import json, other as something",
        "from other import name",
        "from other import *",
        "def later():\n    import other",
        "if False:\n    import other",
        "try:\n    import other\nexcept ImportError:\n    pass",
        "import importlib\nx = importlib.import_module('other')",
        "x = __import__('other')",
    ],
)
def test_every_import_is_followed(statement: str, write: Write) -> None:
    write(one=statement, other="import third", third="", beside="")
    assert list(digests(["one"])) == ["one", "other", "third"]


@pytest.mark.parametrize(
    "statement",
    [
        "from . import part",
        "from .part import name",
        "from pack import part",
        "import pack.part",
        "from ..pack import part",
        "import importlib\nimportlib.import_module('.part', __package__)",
    ],
)
def test_packages_are_followed(
    statement: str, write: Write, tmp_path: pathlib.Path
) -> None:
    relative = "..pack" in statement
    write(pack__one=statement, pack__part="", pack__beside="", pack__init="")
    (tmp_path / "pack" / "init.py").rename(tmp_path / "pack" / "__init__.py")
    found = set(digests(["pack.one"]))
    # Beyond the top-level package there is nothing to import.
    assert found == {"pack", "pack.one", *([] if relative else ["pack.part"])}


def test_circles_end(write: Write) -> None:
    write(one="import other", other="import one")
    assert list(digests(["one"])) == ["one", "other"]


def test_installed_packages_python_and_this_project_are_left_out(write: Write) -> None:
    write(one="import numpy, json, sys, dpsgd, trainer.settings, keras, not_there")
    assert list(digests(["one"])) == ["one"]


def test_a_file_that_shadows_a_module_of_python_is_the_users(write: Write) -> None:
    write(one="import wave", wave="X = 1")
    assert list(digests(["one"])) == ["one", "wave"]


def test_modules_in_an_archive_are_read(
    write: Write, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(one="import packed")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("packed.py", "X = 1")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "all.zip"), *sys.path])
    assert list(digests(["one"])) == ["one", "packed"]


def test_what_differs_or_is_gone_is_named(write: Write, tmp_path: pathlib.Path) -> None:
    write(one="import other, third", other="X = 1", third="", fourth="")
    recorded = digests(["one"])
    assert changed(recorded) == []
    write(other="X = 2", fourth="X = 2")
    (tmp_path / "third.py").unlink()
    assert changed(recorded) == ["other", "third"]


def test_a_file_that_cannot_be_read_is_refused(
    write: Write, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(one="")
    (tmp_path / "one.py").unlink()
    (tmp_path / "one.py").symlink_to(tmp_path / "loop.py")
    monkeypatch.setattr(
        "trainer.model.user_sources.file_of", lambda _: str(tmp_path / "one.py")
    )
    with pytest.raises(InputError, match=r"one\.py to be readable"):
        digests(["one"])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nosuch:f", "there is no module 'nosuch'"),
        ("one.nosuch:f", r"there is no module 'one\.nosuch'"),
        ("one:f", r"one\.py has none of that name"),
        ("broken:f", "SyntaxError"),
    ],
)
def test_a_function_that_is_not_there_is_refused(
    spec: str, says: str, write: Write
) -> None:
    write(one="def g(): 'f'", broken="def f(")
    with pytest.raises(InputError, match=says):
        check_function(spec, "model")


def test_folders_without_a_file_of_their_own_are_packages(write: Write) -> None:
    write(outer__inner__one="def f(): pass")
    check_function("outer.inner.one:f", "model")
    with pytest.raises(InputError, match="has none of that name"):
        check_function("outer.inner.one:g", "model")
    with pytest.raises(InputError, match=r"no module 'outer\.inner\.two'"):
        check_function("outer.inner.two:f", "model")


@pytest.mark.parametrize(
    "source",
    [
        "def f(): 1 / 0",
        "f = 1 / 0",
        "from other import f",
        "from other import g as f",
        "from other import *",
        "def __getattr__(name): pass",
        "globals()['f'] = 1",
    ],
)
def test_a_function_that_may_be_there_is_not_refused(source: str, write: Write) -> None:
    write(one=source)
    check_function("one:f", "model")
    check_function("json:nosuch", "model")  # is imported: what it has, loading says
