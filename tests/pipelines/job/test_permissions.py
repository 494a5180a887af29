"""What a job leaves on this machine is for its owner alone, whatever was there before.

Sensitive files are closed to other users by their own mode and by that of their folder.
"""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Iterator

import pytest

from accounting.core.validation import InputError
from pipelines.files import storage
from tests.pipelines.conftest import SmallJobs

#: What others may know, once its folder is opened to them.
PUBLIC = {"manifest.json"}


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The most careless umask there is: modes are those that the code asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def check_closed(folder: pathlib.Path) -> None:
    """Folders 0700, files 0600 but for the manifest."""
    found = [folder, *folder.rglob("*")]
    modes = {path.relative_to(folder): mode(path) for path in found}
    wanted = {
        path.relative_to(folder): 0o700
        if path.is_dir()
        else (0o644 if path.name in PUBLIC else 0o600)
        for path in found
    }
    assert modes == wanted


@pytest.mark.parametrize("before", [None, 0o777])
def test_batches_are_closed_in_a_new_and_in_an_open_folder(
    jobs: SmallJobs, before: int | None
) -> None:
    out = jobs.folder / "o"
    if before is not None:
        out.mkdir(before)
    key = None if before else out / "mykey"  # a key there does not open the folder
    jobs.write(key_file=key)
    assert len(list(out.glob("batches-*"))) > 1
    check_closed(out)


def test_an_unfinished_job_is_closed_and_so_is_its_shuffle(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where somebody opened its folders between two tries."""
    layout = jobs.layout(sampler="dynamic-shuffle")
    out, _ = jobs.open("o", layout)
    for folder in (out, out / "private", out / "private" / "files"):
        folder.chmod(0o755)

    def never_done(*_: object) -> None:
        raise InputError("the disk of the manifest is lost")

    monkeypatch.setattr("pipelines.job.job_folder.finish_job", never_done)
    with pytest.raises(InputError, match="is lost"):
        jobs.write("o", layout)
    names = {path.name.split("-")[0] for path in out.rglob("*")}
    assert {"batches", "starts", "block", "job.json"} <= names
    check_closed(out)


def test_a_folder_of_another_user_is_refused_before_any_work(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = jobs.folder / "o"
    out.mkdir(0o755)
    monkeypatch.setattr(storage.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError) as error:
        jobs.write()
    assert str(out) in str(error.value)
    assert not list(out.iterdir())


def test_a_file_system_that_keeps_no_modes_is_refused(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a mount shows one mode for everything, whatever is asked for."""
    make = os.mkdir
    monkeypatch.setattr(storage.os, "chmod", lambda *_, **__: None)
    monkeypatch.setattr(storage.os, "mkdir", lambda path, _: make(path, 0o755))
    with pytest.raises(InputError, match=r"0755.* file system"):
        jobs.write()
    assert not list((jobs.folder / "o").rglob("*.*"))
