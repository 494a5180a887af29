"""What a job leaves on this machine is for its owner alone, whatever was there before.

Sensitive files are closed to other users by their own mode and by that of their folder.
"""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Callable, Iterator

import apache_beam as beam
import pytest

from accounting.core.validation import InputError
from pipelines.files import key_files as keys
from pipelines.files import storage
from pipelines.inputs.parquet_blocks import Dataset, footer_digest, list_blocks
from pipelines.job import job_folder
from pipelines.job.packing import Layout
from pipelines.job.poisson_batches import PoissonBatches
from pipelines.job.poisson_batching import write_batches
from tests.pipelines.conftest import run_command

MakeLayout = Callable[..., Layout]

#: What others may know, once its folder is opened to them.
PUBLIC = {"manifest.json"}


@pytest.fixture
def dataset(input_folder: pathlib.Path) -> Dataset:
    return list_blocks(str(input_folder))


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
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    before: int | None,
) -> None:
    out = tmp_path / "o"
    if before is not None:
        out.mkdir(before)
    key = None if before else out / "mykey"  # a key there does not open the folder
    write_batches(dataset=dataset, layout=make_small_layout(8), out=out, key_file=key)
    assert len(list(out.glob("batches-*"))) > 1
    check_closed(out)


def test_an_unfinished_job_is_closed_and_so_is_its_shuffle(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where somebody opened its folders between two tries."""
    out, layout = tmp_path / "o", make_small_layout(8, sampler="dynamic-shuffle",
        truncated_batch_size=None, num_epochs=4)  # fmt: skip
    job_folder.open_job(out, layout, dataset, None)
    for folder in (out, out / "private", out / "private" / "files"):
        folder.chmod(0o755)

    def never_done(*_: object) -> None:
        raise InputError("the disk of the manifest is lost")

    monkeypatch.setattr("pipelines.job.poisson_batching.finish_job", never_done)
    with pytest.raises(InputError, match="is lost"):
        write_batches(dataset=dataset, layout=layout, out=out)
    names = {path.name.split("-")[0] for path in out.rglob("*")}
    assert {"batches", "boundaries", "block", "job.json"} <= names
    check_closed(out)


def test_a_folder_of_another_user_is_refused_before_any_work(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "o"
    out.mkdir(0o755)
    monkeypatch.setattr(storage.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError) as error:
        write_batches(dataset=dataset, layout=make_small_layout(8), out=out)
    assert f"--out {out}" in str(error.value)
    assert f"{out / 'new'}" in str(error.value), "no remedy that can be typed"
    assert not list(out.iterdir())


def test_a_file_system_that_keeps_no_modes_is_refused(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a mount shows one mode for everything, whatever is asked for."""
    make = os.mkdir
    monkeypatch.setattr(storage.os, "chmod", lambda *_, **__: None)
    monkeypatch.setattr(storage.os, "mkdir", lambda path, _: make(path, 0o755))
    with pytest.raises(InputError, match=r"0755.* file system"):
        write_batches(dataset=dataset, layout=make_small_layout(8), out=tmp_path / "o")
    assert not list(tmp_path.rglob("*.*"))


def test_a_new_folder_of_a_key_is_closed(tmp_path: pathlib.Path) -> None:
    keys.create_key_file(tmp_path / "new" / "folder" / "key")
    assert mode(tmp_path / "new" / "folder") == 0o700
    # A folder that is there may hold other things: the key's own mode guards it.
    (tmp_path / "there").mkdir(0o755)
    keys.create_key_file(tmp_path / "there" / "key")
    assert mode(tmp_path / "there") == 0o755
    assert mode(tmp_path / "there" / "key") == 0o600


@pytest.mark.parametrize("before", [None, 0o755])
def test_prepared_rows_are_closed(
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    before: int | None,
) -> None:
    raw, out = tmp_path / "raw", tmp_path / "data"
    if before is not None:
        out.mkdir(before)
    for command in (
        ["synth", "--rows", "100", "--out", str(raw)],
        ["prepare", "--input", str(raw), "--out", str(out)],
    ):
        assert run_command(monkeypatch, capfd, *command)[0] == 0
    assert mode(out) == 0o700
    assert mode(raw) == 0o777, "synthetic rows are public"


def test_the_pipeline_holds_no_digest_of_a_footer(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    key_file: pathlib.Path,
    pipeline_bytes: Callable[[beam.Pipeline], bytes],
) -> None:
    """A digest of column statistics lets a guess at a row be checked."""
    pipeline = beam.Pipeline(runner="FnApiRunner")
    batches = PoissonBatches(
        make_small_layout(8).plan, dataset, tmp_path / "o", key_file=key_file
    )
    _ = pipeline | beam.Create(dataset.blocks) | batches
    seen = pipeline_bytes(pipeline)
    assert b"part-1.parquet" in seen, "the test does not see what workers get"
    files = {block.name: block.path for block in dataset.blocks}
    digests = [*map(footer_digest, files.values()), dataset.digest]
    assert len(set(digests)) == 3
    for digest in digests:
        for secret in (digest.encode(), bytes.fromhex(digest)):
            assert secret not in seen
        assert digest not in repr(dataset)
