"""Lines for terminals: broken between words alone, and whole for files."""

from __future__ import annotations

import sys

import pytest

from pipelines.cli.console import wrap, wrapped

LINES = [
    "  accountant  sums by a tilted Fourier transform; connect-the-dots grid",
    "    - realised batch sizes and weights, and which example was in which step",
    "The released model is (2.9995, 1e-06)-differentially private.",
    "",
]


@pytest.mark.parametrize("width", [20, 30, 80])
@pytest.mark.parametrize("line", LINES)
def test_lines_are_broken_between_words_and_indented(line: str, width: int) -> None:
    first, *rest = wrap(line, width).split("\n")
    assert " ".join([first, *rest]).split() == line.split()
    assert all(len(part) <= width or " " not in part.strip() for part in rest)
    indent = line.index("sums") if "sums" in line else 6 if "- real" in line else 0
    for part in rest:
        assert len(part) - len(part.lstrip()) == indent


def test_only_a_terminal_gets_broken_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert wrapped(LINES[0]) == LINES[0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert wrapped("\n".join(LINES[:2])).count("\n") > 2
