"""``--out``: what cannot become a folder is refused in one line, before any work."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from accounting.core.validation import InputError
from pipelines.files.output_folder import check_output
from pipelines.files.unfinished import staged_folder
from pipelines.inputs.input_files import check_outside
from pipelines.tables.job import prepare_job
from tests.pipelines.conftest import Command, write_table

#: Name -> --out that is none, in a folder with the file ``file`` and a closed folder.
BAD = {
    "below a file": "file/out",
    "far below a file": "file/a/b",
    "a long name": "n" * 300,
    "a long name below new folders": f"new/{'n' * 300}",
    "a long name amid": f"{'n' * 300}/out",
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

    monkeypatch.setattr(prepare_job._Job, "convert_file", read)
    monkeypatch.setattr("pipelines.tables.synthetic.synthetic_rows", read)
    monkeypatch.setattr("pipelines.job.poisson_batching._run_pipeline", read)


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", ["synth", "prepare", "batches"])
def test_a_bad_name_is_one_line_before_any_work(
    place: pathlib.Path, tmp_path: pathlib.Path, command: Command, name: str, bad: str
) -> None:
    (tmp_path / "lines.txt").write_text("0\n")
    write_table(tmp_path / "rows.parquet", 0, 100, 50)
    rows = f"--input={tmp_path / 'rows.parquet'}"
    options = {
        "synth": ["--rows=10"],
        "prepare": [f"--input={tmp_path / 'lines.txt'}"],
        "batches": [rows, "--batch-size=10", "--epochs=1"],
    }[name]
    before, out = listing(place), place / bad
    ran = command(name, *options, f"--out={out}")
    assert ran.code == 2, ran.printed
    line = r"error: Expected --out [^\n]+ Choose another[^\n]*\.\n"
    assert re.fullmatch(line, ran.printed)
    assert str(out) in ran.printed
    # `batches` makes the folders above its own before the name is tried.
    assert [path for path in listing(place) if path != "new"] == before
    assert name == "batches" or not (place / "new").exists()


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize("code", [errno.EBUSY, errno.EACCES, errno.EXDEV])
def test_a_folder_that_cannot_be_replaced_takes_one_within(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A mount point is busy; a folder in one that is not ours cannot be renamed."""
    out, rename = place / "out", os.rename
    out.mkdir()

    def refuse(source: str, target: str) -> None:
        if out in (pathlib.Path(source), pathlib.Path(target)):
            raise OSError(code, os.strerror(code), os.fspath(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(InputError, match=os.strerror(code)) as error:
        check_output(out)
    typed = re.search(r"one within it, --out (\S+)\.$", str(error.value))
    assert typed, error.value
    with staged_folder(typed[1]) as root:
        (root / "part").write_text("x")
    assert listing(out) == ["new", "new/part"]


def test_a_real_mount_point_is_refused_before_any_work(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Also one of the same file system, which no comparison of devices tells."""
    unshare = shutil.which("unshare")
    spaces = [unshare or "", "--map-root-user", "--mount"]
    if not unshare or subprocess.run([*spaces, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    for folder in ("out", "from"):
        (tmp_path / folder).mkdir()
    script = (
        f"mount --bind {tmp_path / 'from'} {tmp_path / 'out'} && "
        f"exec {sys.executable} -m dpsgd synth --rows 10 --out {tmp_path / 'out'}"
    )
    refused, done = (
        subprocess.run(
            [*spaces, "sh", "-c", f"{script}{more}"], cwd=root, capture_output=True,
            text=True, check=False,
        )
        for more in ("", "/new")
    )  # fmt: skip
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.count("\n") == 1
    assert f"Choose one within it, --out {tmp_path / 'out' / 'new'}." in refused.stderr
    assert done.returncode == 0, done.stderr
    assert listing(tmp_path / "from") == ["new", "new/part-00000.txt"]


@pytest.mark.parametrize("make", [None, pathlib.Path.mkdir])
def test_the_check_leaves_all_as_it_was(
    place: pathlib.Path, make: Callable[[pathlib.Path], None] | None
) -> None:
    out = place / "out" if make else place / "new" / "deep" / ("n" * 255)
    if make:
        make(out)
        out.chmod(0o750)
    before, inode = listing(place), make and out.stat()
    assert check_output(out) == out
    assert listing(place) == before
    if inode:
        assert (out.stat().st_ino, out.stat().st_mode) == (inode.st_ino, inode.st_mode)


def test_the_name_alone_prints_the_help_as_it_is(root: pathlib.Path) -> None:
    run = [sys.executable, "-m", "dpsgd"]
    bare, asked = (
        subprocess.run(
            [*run, *more], cwd=root, capture_output=True, text=True, check=False
        )
        for more in ([], ["--help"])
    )
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == asked.stdout
    assert len(bare.stdout.splitlines()) > 20


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


@pytest.mark.parametrize(
    ("source", "out", "is_refused"),
    [
        ("table", "table/new", True),
        ("table", "table/day=3/new", True),
        ("table", "link/new", True),
        ("table/**/*.csv", "table/new", False),  # which would hold Parquet
        ("table/**", "table/new", True),
        ("table", "table/_new", False),  # hidden
        ("table", "table-new", False),
        ("table/a.csv", "table/new", False),
    ],
)
def test_an_output_that_is_part_of_the_input_is_refused(
    place: pathlib.Path, source: str, out: str, is_refused: bool
) -> None:
    (place / "table").mkdir()
    (place / "table" / "a.csv").write_text("y\n1\n")
    (place / "link").symlink_to(place / "table")
    names = ("train", "part-00000.parquet")
    refused = pytest.raises(InputError, match=r"--out .* not to lie in --input .*table")
    with refused if is_refused else contextlib.nullcontext():
        check_outside(str(place / source), str(place / out), *names)


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize(
    "line",
    [
        "prepare --input=. --out=new",
        "schema . --out=s.toml",
        "bound --input=. --out=new --user-column=u --max-examples-per-user=1 "
        "--num-examples=9",
        "batches --input=. --out=new --batch-size=1 --epochs=1",
    ],
)
def test_commands_refuse_an_output_in_their_input(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, command: Command, line: str
) -> None:
    (place / "table").mkdir()
    (place / "table" / "a.txt").write_text("0\n")
    monkeypatch.chdir(place / "table")
    ran = command(*line.split())
    assert ran.code == 2
    assert "not to lie in --input ., which would be read with it" in ran.printed
    assert listing(place / "table") == ["a.txt"]
