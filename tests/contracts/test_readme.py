"""README and documentation: what they show runs, and what they name exists.

The code blocks of a page run in their order, as a newcomer types them, in a folder with
what the first run left, or in an empty one (see ALONE): a reader may come from there,
and need not have read the other pages.  A block of `text` is what the block before it
prints, where `...` stands for anything.  Blocks after a comment "not run: reason" are
skipped for that reason.  `train.txt` is the real sample where there is one, else
synthetic; sizes that are meant for 46 million rows are replaced by ones for two
thousand; audits err once in a million times, one plan is of two steps an epoch, and one
comparison is without the runs that are not private (see REPLACED).
"""

from __future__ import annotations

import doctest
import fcntl
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import yaml

from accounting.cli.command import parse
from dpsgd.command_line import function_of
from tests.warm_processes import warm_python

ROOT = pathlib.Path(__file__).parent.parent.parent
BLOCK = re.compile(
    r"^(<!-- not run: [^\n]+ -->\n)?```(sh|python|text)\n(.*?)^```$", re.M | re.S
)
PLAN = (
    "plan --num-examples 16000 --batch-size 256 --epochs 2 --epsilon 3 --delta 1e-6\n"
)
REPLACED = {
    "--batch-size 65536": "--batch-size 128",
    "dpsgd audit ": "dpsgd audit --confidence 0.999999 ",
    PLAN: PLAN.replace("16000", "520"),
    "comparison \\\n    --batch": "comparison --method dp-sgd \\\n    --batch",
}


def _pages(entry: str | dict[str, Any]) -> Iterator[str]:
    """The pages of an entry of the navigation, which may be a group of entries."""
    if isinstance(entry, str):
        yield entry
        return
    for value in entry.values():
        for inner in [value] if isinstance(value, str) else value:
            yield from _pages(inner)


NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for group in NAV for name in _pages(group)),
]
#: Pages that tests of their own run.
OF_PACKAGES = [
    ROOT / "accounting" / "README.md",
    ROOT / "pipelines" / "README.md",
    ROOT / "tests" / "engines" / "harness" / "README.md",
]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
#: Pages that run in an empty folder; the others in what the first run left.
ALONE = ("README", "first_run", "your_table", "users", "samplers")
#: Verdicts of a page's audits: of users whom nobody bounded, and those of a run.
VERDICTS = {"users": ["VIOLATED"],
            "privacy_statement": ["consistent", "VIOLATED"]}  # fmt: skip


def named(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """One code block.

    Attributes:
      page: Where it is.
      run: Whether it is not marked "not run".
      language: "sh", "python", or "text" for what the block before prints.
      text: Its lines.
    """

    page: pathlib.Path
    run: bool
    language: str
    text: str


def blocks(*pages: pathlib.Path) -> list[Block]:
    return [
        Block(page, not skipped, language, text)
        for page in pages
        for skipped, language, text in BLOCK.findall(page.read_text())
    ]


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of ``dpsgd``, that of this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "dpsgd"
    command.write_text(f'#!/bin/sh\nexec "{warm_python()}" -m dpsgd "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def folder_after(
    tmp_path_factory: pytest.TempPathFactory, commands: pathlib.Path
) -> Callable[[str], pathlib.Path]:
    """``folder_after(page)``: what its blocks leave, made once for all processes.

    Not to be changed.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def make(page: str) -> pathlib.Path:
        folder, half = shared / page, shared / f"{page}.half"
        with open(shared / f"{page}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                shutil.rmtree(half, ignore_errors=True)
                if page in ALONE:
                    half.mkdir()
                else:
                    shutil.copytree(make("first_run"), half)
                run_blocks(page, half, commands)
                half.rename(folder)
        return folder

    return make


def run(block: Block, folder: pathlib.Path, commands: pathlib.Path) -> str:
    """What a block prints in ``folder``, which must be without an error."""
    text = block.text
    for shown, tried in REPLACED.items():
        text = text.replace(shown, tried)
    shell = ["bash", "-euo", "pipefail", "-c", text]
    path = f"{commands}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        shell if block.language == "sh" else [warm_python(), "-c", text],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    where = f"{named(block.page)}:\n{text}"
    assert result.returncode == 0, f"{where}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.slow
def test_blocks_of_the_readme_run(folder_after: Callable[[str], pathlib.Path]) -> None:
    run = folder_after("README") / "fit" / "run"
    assert "(3.0000, " in (run / "privacy.txt").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "page", [page.stem for page in PAGES[1:] if any(b.run for b in blocks(page))]
)
def test_blocks_of_a_page_run(
    page: str, folder_after: Callable[[str], pathlib.Path]
) -> None:
    assert folder_after(page).is_dir()


def run_blocks(page: str, folder: pathlib.Path, commands: pathlib.Path) -> None:
    """Runs the blocks of a page in order; checks what they print, judge and leave."""
    sample = ROOT.parent / "shared" / "data" / "criteo_sample.txt"
    sample = pathlib.Path(os.environ.get("DPSGD_CRITEO_SAMPLE", sample))
    printed, typed = [""], ""
    [path] = [path for path in PAGES if path.stem == page]
    for block in blocks(path):
        if not block.run:
            continue
        if block.language == "text":
            same = doctest.OutputChecker().check_output
            wanted = block.text
            assert same(wanted, printed[-1], doctest.ELLIPSIS), printed[-1]
            continue
        if "train.txt" in block.text and not (folder / "train.txt").exists():
            source = sample if sample.is_file() else folder / "text/part-00000.txt"
            shutil.copy(source, folder / "train.txt")
        printed.append(run(block, folder, commands))
        typed += block.text.replace("\\\n", " ")
    verdicts = re.findall(r"^verdict: (\w+)", "".join(printed), re.M)
    assert verdicts == VERDICTS.get(page, [])
    for name in re.findall(r"^dpsgd train .*--out (\S+)", typed, re.M):
        assert (folder / name / "model.keras").exists()


@pytest.mark.parametrize("page", [PAGES[0], *OF_PACKAGES, *OTHERS], ids=named)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    """Of the pages that are read without the site, which checks its own."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=named)
def test_files_that_a_page_names_exist(page: pathlib.Path) -> None:
    folders = "accounting|deploy|docs|dpsgd|pipelines|tests|trainer"
    pattern = rf"[`\"\[ (]((?:{folders})/[\w./-]*\w/?)"
    missing = [
        path
        for path in re.findall(pattern, page.read_text())
        if not (ROOT / path).exists()
    ]
    assert not missing


@pytest.mark.parametrize(
    "line",
    [
        line
        for block in blocks(ROOT / "docs" / "papers.md")
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.startswith("dpsgd ")
    ],
)
def test_a_command_that_no_test_runs_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    parse(function_of(name), arguments)  # raises for what the command refuses


def test_the_site_is_built_without_a_warning(tmp_path: pathlib.Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    import dpsgd

    reference = (tmp_path / "reference.html").read_text()
    documented = set(re.findall(r'id="dpsgd\.(\w+)"', reference))
    assert documented == set(dpsgd.__all__) - {"__version__"}
