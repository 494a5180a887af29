"""``--out``: what cannot become a folder is refused in one line, before any work."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from dpsgd.command_line import COMMANDS
from pipelines.tables import prepare as preparation
from tests.pipelines.conftest import Command, write_table

#: Name -> --out that is none, in a folder with the file ``file`` and a closed folder.
BAD = {
    "below a file": "file/out",
    "a long name": "n" * 300,
    "a long name below new folders": f"new/{'n' * 300}",
    "a loop": "loop/out",
}


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "file").write_text("mine")
    (folder / "loop").symlink_to("loop")
    return folder


def listing(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(preparation._Job, "convert", read)
    monkeypatch.setattr("pipelines.tables.synthetic.synthetic_rows", read)
    monkeypatch.setattr("pipelines.job.poisson_batching.run_to_end", read)


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", ["prepare", "batches"])
def test_a_bad_name_is_one_line_before_any_work(
    place: pathlib.Path, tmp_path: pathlib.Path, command: Command, name: str, bad: str
) -> None:
    (tmp_path / "lines.txt").write_text("0\n")
    write_table(tmp_path / "rows.parquet", 0, 100, 50)
    rows = f"--input={tmp_path / 'rows.parquet'}"
    options = {
        "prepare": [f"--input={tmp_path / 'lines.txt'}", "--schema=criteo"],
        "batches": [rows, "--batch-size=10", "--epochs=1"],
    }[name]
    before, out = listing(place), place / bad
    ran = command(name, *options, f"--out={out}")
    assert ran.code == 2, ran.printed
    line = r"error: Expected --out [^\n]+ Choose another[^\n]*\.\n"
    assert re.fullmatch(line, ran.printed)
    assert str(out) in ran.printed
    # The folders above are made before the name is tried.
    assert [path for path in listing(place) if path != "new"] == before


@pytest.mark.parametrize("more", [[], ["--help"]])
def test_the_name_alone_shows_how_to_start(root: pathlib.Path, more: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dpsgd", *more], cwd=root, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    wanted = COMMANDS if more else ("demo", "fit", "plan", "dpsgd.make_private")
    assert all(name in done.stdout for name in wanted)
    assert len(done.stdout.splitlines()) <= 40


def test_what_the_system_says_of_other_paths_is_one_line(
    place: pathlib.Path, command: Command
) -> None:
    """A net for what no command foresaw."""
    out = place / "file" / "comparison"
    ran = command("demo", f"--out={out}", "--rows=50000")
    assert ran.code == 2
    line = r"error: Expected to read and write files: Not a dir[^\n]+\n"
    assert re.fullmatch(line, ran.printed)
    assert str(out) in ran.printed
