"""Damaged and forged folders of batches: findings of one line."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.batches.verify import verify
from pipelines.files.key_sources import create_key_file, read_key_file
from pipelines.job import job_folder
from tests.pipelines.conftest import SmallJobs, contents


def edit(path: pathlib.Path, change: Any) -> None:
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "name", ["../../secret", "/etc/passwd", "..", ".", "a/b", "", ".hidden", 7, None]
)
def test_a_manifest_does_not_lead_out_of_its_folder(
    batches: pathlib.Path, name: Any
) -> None:
    """Whoever forged it can also forge the digests."""
    (batches.parent.parent / "secret").write_text("secret")

    def forge(fields: Any) -> None:
        fields["files"][0]["name"] = name

    edit(batches / "manifest.json", forge)
    with pytest.raises(InputError, match="without folders; it was edited") as error:
        verify(batches)
    assert "\n" not in str(error.value)


def test_a_flipped_digit_of_the_sampling_key_is_a_finding(
    batches: pathlib.Path,
) -> None:
    path = batches / "private" / "sampling.key"
    assert verify(batches).findings == ()
    key = path.read_text()
    path.write_text(("0" if key[0] != "0" else "1") + key[1:])
    (finding,) = verify(batches).findings
    assert f"{path} to be the key of these batches; it was changed" in finding
    assert key[:8] not in finding
    path.unlink()  # a key that was moved is nobody's fault
    assert verify(batches).findings == ()


def test_a_damaged_checksum_is_of_a_file_that_is_made_again(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job_folder, "finish_job", killed)
        with pytest.raises(KeyboardInterrupt):
            jobs.write("killed")
    wanted = contents(jobs.write("whole"))
    out, damages = (
        jobs.folder / "killed",
        (b"", b"{", b"[]", b"7", b"{}", b'{"size": 1}'),
    )
    names = [jobs.layout().file(place).name for place in range(len(damages))]
    for name, content in zip(names, damages, strict=True):
        written = (out / name).read_bytes()
        (out / name).write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
        pathlib.Path(job_folder.checksum_path(str(out), name)).write_bytes(content)
        assert wanted[name] == written
    assert contents(jobs.write("killed")) == wanted


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_key_file_that_is_none_is_refused_and_not_waited_for(
    tmp_path: pathlib.Path, kind: str
) -> None:
    path = tmp_path / "key"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(0o700)
    else:
        path = pathlib.Path(os.devnull)
    with pytest.raises(InputError, match="a folder, a pipe or a device"):
        read_key_file(path)
    link = tmp_path / "link"
    create_key_file(tmp_path / "real")
    link.symlink_to(tmp_path / "real")
    assert read_key_file(link) == read_key_file(tmp_path / "real")
