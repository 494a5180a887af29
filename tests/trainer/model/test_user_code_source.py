"""A user's function, found in the source of its module without running it."""

from __future__ import annotations

import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from accounting.core.validation import InputError
from trainer.model.user_code import check_function

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
    new = [sys.modules[name] for name in set(sys.modules) - before]
    assert not any(getattr(one, "__file__", None) for one in new), "source was run"


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
