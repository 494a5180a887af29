"""Wrong calls of every command: exit code 2, one line, and a remedy that works.

`wrong_calls.txt` holds them.  ``[command] base`` starts the calls of a command, and
``[@name]`` rows that several commands share, under ``@name``.  A row is what a user
typed, what the answer must hold (the value and the bound), and the remedy: flags that
are added (the last value of a flag wins) or, after a minus, taken away.  With it the
same command gets to its work; without a remedy, the answer names what to give.

    --nosuch | option: --nosuch | - --nosuch      flags that are added to the base
    --epochs: 0 | epochs=0 >= 1 | 1         a value of a flag, and one in its place
    = --input a | Expected --out with a value    the whole call, without the base
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.cli.command import names_of
from dpsgd import command_line
from pipelines.batches.folder import read_manifest
from pipelines.core.batches.manifest import Manifest
from tests.command_line import invoke
from tests.contracts import mistaken_tables
from tests.trainer.conftest import BatchFolder, write_run_folder
from trainer.report import run_files
from trainer.report.run_files import Serving


@dataclasses.dataclass(frozen=True)
class Row:
    """One wrong call.

    Attributes:
      flags: What is added to the base of the command; all of it if ``whole``.
      says: Must be in the answer.
      remedy: What mends it; None where the answer names a file or flag to give.
      whole: Whether there is no base.
    """

    flags: str
    says: str
    remedy: str | None = None
    whole: bool = False


def read_row(line: str) -> Row:
    flags, says, *rest = line.split(" | ")
    remedy = rest[0] if rest else None
    if flags[0] == "=":
        return Row(flags[2:], says, remedy, whole=True)
    if found := re.fullmatch(r"(-[\w-]+): (.*)", flags):
        flag, value = found.groups()
        return Row(f"{flag} {value}", says, f"- {flag} + {flag} {remedy}")
    return Row(flags, says, remedy)


def read_tables() -> tuple[dict[str, str], dict[str, list[Row]]]:
    """Returns the base and the wrong calls of each command."""
    bases, tables = dict[str, str](), dict[str, list[Row]]()
    text = pathlib.Path(__file__).with_name("wrong_calls.txt").read_text()
    for line in text.splitlines():
        if line.startswith("["):
            name, _, base = line[1:].partition("]")
            bases[name], tables[name] = base.strip(), []
        elif line.startswith("@"):
            tables[name] += tables[line]
        elif line:
            tables[name].append(read_row(line))
    commands = [name for name in tables if not name.startswith("@")]
    return bases, {name: tables[name] for name in commands}


BASES, TABLES = read_tables()
CALLS = [(command, each) for command, rows in TABLES.items() for each in rows]
#: Commands with their words sorted, that got to their work: the remedy of many rows.
WORKED = set[tuple[str, ...]]()


class Reached(Exception):  # noqa: N818 (it is none)
    """The command began its work."""


def reached(*_: Any, **__: Any) -> Any:
    raise Reached


#: Where the work of a command begins, if it is no matter of a moment.
WORK = {
    "batches": "pipelines.job.job_folder.open_job",
    "demo": "trainer.cli.demo.run_stage",
    "fit": "dpsgd.fit_stages.run_stage",
    "train": "trainer.report.progress.Terminal.say",
    "predict": "trainer.report.progress.Terminal.say",
    "evaluate": "trainer.report.progress.Terminal.say",
    "tune": "trainer.releases.tuning._priced",
    "audit": "trainer.auditing._attack",
    "compare": "trainer.experiments.compare.find_cases",
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command said, and whether it got to its work."""

    code: Any
    out: str
    lines: list[str]
    worked: bool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Data of every stage."""

    root = tmp_path_factory.mktemp("calls")
    (root / "input").mkdir()
    table = pa.table({"id": np.arange(100), "label": (np.arange(100) % 2).astype("i1")})
    pq.write_table(table, root / "input" / "a.parquet", row_group_size=25)
    for line in (
        f"synth --rows 200 --out {root}/text",
        f"prepare --input {root}/text --out {root}/data --schema criteo",
        f"batches --input {root}/data/train --out {root}/batches --batch-size 16 "
        "--epochs 1",
    ):
        result = invoke(shlex.split(line))
        assert result.exit_code == 0, result.output
    _write_run(root / "run", read_manifest(root / "batches"))
    ages = "".join(f"{row % 90},{row % 2}\n" for row in range(9_000))
    (root / "numbers.csv").write_text(f"age,income\n{ages}")
    label = '[columns.income]\nkind = "label"\ntask = "binary"\n'
    split = "[split]\nby = 'fraction'\nshares = [50, 50, 0]\n"
    numbers = f'version = 1\n{split}[columns.age]\nkind = "numeric"\n{label}'
    (root / "numbers.toml").write_text(numbers)
    line = f"prepare --input {root}/numbers.csv --schema {root}/numbers.toml"
    assert (invoke([*line.split(), f"--out={root}/numbers"])).exit_code == 0
    (root / "list.json").write_text("[1]")
    (root / "own.py").write_text("")
    (root / "wrong.json").write_text('{"C99": ["a"]}')
    (root / "table.csv").write_text("age,income\n39,1\n40,0\nx,1\n")
    label = 'version = 1\n[columns.income]\nkind = "label"\ntask = "binary"\n'
    (root / "table.toml").write_text(f'{label}[columns.age]\nkind = "numeric"\n')
    users = '[columns.age]\nkind = "user"\n'
    (root / "users.toml").write_text(label + users)
    others = (f'[columns.{name}]\nkind = "category"\n' for name in ("city", "day"))
    (root / "other.toml").write_text(label + "".join(others))
    mistaken_tables.write(root)
    good = (root / "text").glob("*").__next__().read_text().splitlines()[:20]
    (root / "bad.txt").write_text("\n".join([good[0], "1\t2", *good[1:]]) + "\n")
    return root


def _write_run(run: pathlib.Path, manifest: Manifest) -> None:
    """Writes what a finished run has, as far as is looked at before any work."""
    write_run_folder(run, BatchFolder(run.parent, manifest, []), target_delta=1e-6)
    for name in ("saved_model", "iterates"):
        (run / name).mkdir()
    for step in (1, 2):
        (run / "iterates" / f"step-{step:08d}.npz").touch()
    inputs = tuple(column for column in manifest.columns if column.name != "label")
    run_files.write_serving(
        run, Serving(inputs=inputs, outputs=("probability",), task="binary")
    )


Call = Callable[[str, list[str]], Answer]


@pytest.fixture
def call(
    folder: pathlib.Path,
    answers_once: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Call:
    """Runs a command in this process, beside the data, and stops where it works."""
    for path in folder.iterdir():
        os.symlink(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(command: str, arguments: list[str]) -> Answer:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(sys, "argv", ["dpsgd", command, *arguments])
        if command in WORK:
            monkeypatch.setattr(WORK[command], reached)
        code: Any = 0
        worked = False
        try:
            command_line.main()
        except SystemExit as end:
            code = end.code or 0
            worked = code == 0
        except Reached:
            worked = True
        printed = capfd.readouterr()
        return Answer(code, printed.out, printed.err.splitlines(), worked)

    return run


def mended(arguments: list[str], change: str) -> list[str]:
    """``arguments`` with flags added, or taken away after a minus."""
    words = iter(shlex.split(change))
    removing, result = False, list(arguments)
    for word in words:
        if word in ("+", "-"):
            removing = word == "-"
        elif removing:
            result = removed(result, word)
        else:
            result.append(word)
    return result


def removed(arguments: list[str], flag: str) -> list[str]:
    """Without a flag and its value."""
    result, words = list[str](), iter(arguments)
    taken = False
    for word in words:
        if word != flag:
            if not (taken and not is_flag(word)):
                result.append(word)
            taken = False
        else:
            taken = word.startswith("--") and "=" not in word
    return result


def is_flag(word: str) -> bool:
    return word.startswith("--")


def arguments_of(command: str, each: Row) -> list[str]:
    base = [] if each.whole else shlex.split(BASES[command])
    return mended(base, each.flags)


def test_the_tables_hold_every_command() -> None:
    assert set(TABLES) == set(command_line.COMMANDS)


def test_every_command_that_takes_a_delta_refuses_a_large_one() -> None:
    takes = {
        name for name in TABLES if "--delta" in names_of(command_line.function_of(name))
    }
    allowed = {name for name, row in CALLS if row.remedy == "--allow-large-delta"}
    assert takes == allowed


@pytest.mark.parametrize("command", TABLES)
def test_the_base_of_each_table_gets_to_its_work(command: str, call: Call) -> None:
    answer = call(command, shlex.split(BASES[command]))
    assert answer.worked, answer.lines


@pytest.mark.parametrize(
    ("command", "each"),
    CALLS,
    ids=[f"{command} {each.flags}" for command, each in CALLS],
)
def test_a_wrong_call_is_one_line_whose_remedy_works(
    command: str, each: Row, call: Call, tmp_path: pathlib.Path
) -> None:
    arguments, before = arguments_of(command, each), set(os.listdir(tmp_path))
    answer = call(command, arguments)
    assert answer.code == 2
    assert not answer.worked
    assert answer.out == ""
    *told, line = answer.lines
    assert line.startswith("error: ")
    assert each.says in line
    # What was done before, as the conversion of all lines, may show its progress.
    assert all(one.startswith("convert: ") for one in told)
    assert set(os.listdir(tmp_path)) == before
    if each.remedy is not None:
        remedied = mended(arguments, each.remedy)
        if (words := (command, *sorted(remedied))) not in WORKED:
            again = call(command, remedied)
            assert again.worked, again.lines
            WORKED.add(words)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["nosuch"], "No such command: nosuch."),
        (["trian"], "No such command: trian. Did you mean train?"),
        (["--verson"], "No such option: --verson. Did you mean --version?"),
    ],
)
def test_a_command_that_is_none_is_one_line(
    flags: list[str], says: str, call: Call
) -> None:
    answer = call(flags[0], flags[1:])
    assert answer.code == 2
    [line] = answer.lines
    assert line.startswith("error: ")
    assert says in line
