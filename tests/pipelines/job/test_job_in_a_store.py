"""The whole job in S3, the server of the moto package: the same bytes as here."""

from __future__ import annotations

import itertools
import os
import pathlib
import stat
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.validation import InputError
from pipelines.batches.folder import read_batches, read_manifest
from pipelines.batches.verify import verify
from pipelines.files import storage
from pipelines.files.key_sources import create_key_file
from pipelines.files.storage import StrPath
from pipelines.job import job_folder, poisson_batching
from tests.conftest import S3Requests
from tests.pipelines.conftest import Command, SmallJobs, contents

ENGINE = PipelineOptions(["--runner=BundleBasedDirectRunner"])


@pytest.fixture
def place(s3_folder: str) -> str:
    """A new folder in a store."""
    return f"{s3_folder}/o"


def upload(source: pathlib.Path, place: str) -> str:
    """Copies the files of a folder into a store."""
    for path in source.iterdir():
        storage.copy_to_store(path, f"{place}/{path.name}")
    return place


def test_commands_write_verify_and_read_the_same_bytes_in_a_store_as_here(
    place: str,
    tmp_path: pathlib.Path,
    input_folder: pathlib.Path,
    key_file: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    source, here = upload(input_folder, f"{place}-input"), tmp_path / "o"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    options = ["--key-file", key_file, "--batch-size=50", "--epochs=1"]
    options += ["--physical-batch-size=16"]
    for where, out in ((input_folder, here), (source, place)):
        ran = command("batches", "--input", where, "--out", out, *options)
        assert ran.code == 0, ran.printed
    assert contents(place) == contents(here)
    assert len(contents(place)) == read_manifest(place).plan.num_steps + 2
    assert not list(tmp_path.glob("dpsgd-spill-*"))
    assert command("verify", place).code == 0
    certify = ["--resample", "--input", source, "--key-file", key_file]
    assert command("verify", place, *certify).code == 0
    steps = [batch.step for batch in read_batches(place)]
    assert steps == [batch.step for batch in read_batches(here)]
    ran = command("batches", "--input", source, "--out", place, *options)
    assert (ran.code, "finished batches" in ran.printed) == (2, True), ran.printed
    # Damage is found.
    name = read_manifest(place).files[1].name
    data = bytearray(storage.read_bytes(f"{place}/{name}"))
    data[len(data) // 2] ^= 1
    storage.write_atomically(f"{place}/{name}", bytes(data))
    storage.write_atomically(f"{place}/batches-stray.tfrecord", b"stray")
    ran = command("verify", place)
    assert ran.code == 2
    found = [line for line in ran.printed.splitlines() if line.startswith("found:")]
    assert len(found) == 2, ran.printed
    assert name in found[0]
    assert "batches-stray" in found[1]
    with pytest.raises(InputError, match=name):
        list(read_batches(place))


@pytest.mark.parametrize("sampler", ["truncated-poisson", "dynamic-shuffle"])
def test_engines_write_the_same_bytes_in_a_store(
    sampler: str, place: str, jobs: SmallJobs
) -> None:
    """Rows and boundaries travel as on a cluster: through the store alone."""
    layout = jobs.layout(4, sampler=sampler)
    jobs.write(place, layout, options=ENGINE)
    assert contents(place) == contents(jobs.write("o", layout))


def test_options_of_a_client_that_is_not_used_are_refused(
    place: str, jobs: SmallJobs
) -> None:
    options = PipelineOptions(["--s3_secret_access_key=canary"])
    with pytest.raises(InputError, match="no --s3_secret_access_key") as error:
        jobs.write(place, options=options)
    assert "canary" not in str(error.value)


@pytest.mark.thorough
def test_a_job_that_failed_anywhere_is_finished_without_repeating_finished_work(
    place: str, jobs: SmallJobs, s3_requests: S3Requests
) -> None:
    scratch = jobs.folder / "scratch"
    jobs.write(place, scratch=scratch)
    total, undisturbed = len(s3_requests.asked), contents(place)
    assert total > 4 * jobs.layout().num_groups
    for allowed in {*range(0, 8, 2), *range(8, total, 151), total - 4, total - 1}:
        out, left = f"{place}{allowed}", itertools.count(-allowed)

        def fail(operation: str, _: Any, left: Any = left) -> None:
            if next(left) >= 0:
                s3_requests.refuse(403, operation)

        s3_requests.fail = fail
        with pytest.raises(InputError, match=r"command again|readable|be used"):
            jobs.write(out, scratch=scratch)
        s3_requests.fail = lambda *_: None
        s3_requests.asked.clear()
        finished = storage.exists(f"{out}/manifest.json")
        if not (finished and not storage.exists(f"{out}/private/job.json")):
            done = len(storage.names(f"{out}/private/files"))
            jobs.write(out, scratch=scratch)
            made = [name for name, given in s3_requests.asked if (
                name == "CompleteMultipartUpload" and ".tfrecord" in given["Key"]
            )]  # fmt: skip
            assert finished or len(made) == jobs.layout().num_groups - done
        assert contents(out) == undisturbed, f"failure at {allowed} of {total}"
    assert not os.listdir(scratch)


def test_another_job_and_other_contents_are_refused_in_a_store(
    place: str, jobs: SmallJobs
) -> None:
    with pytest.raises(InputError, match="--key-file"):
        jobs.write(place, key_file=None)
    layout, other = jobs.layout(), jobs.folder / "other"
    job_folder.open_job(place, layout, jobs.dataset, jobs.key_file)
    key = create_key_file(other).hex()
    with pytest.raises(InputError, match="same sampling key") as error:
        job_folder.open_job(place, layout, jobs.dataset, other)
    assert key not in str(error.value)
    storage.delete_folder(place)
    storage.write_atomically(f"{place}/notes.txt", b"mine")
    with pytest.raises(InputError, match="empty or new folder"):
        job_folder.check_out(place)


def test_a_folder_for_the_shuffle_is_one_users_and_one_jobs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, link = tmp_path / "mine", tmp_path / "link"

    def refused(path: pathlib.Path, message: str) -> None:
        with (
            pytest.raises(InputError, match=message),
            poisson_batching._local_spill(str(path), 1),
        ):
            pass

    (tmp_path / "target").mkdir()
    link.symlink_to(tmp_path / "target")
    refused(link, "of this user")
    with poisson_batching._local_spill(str(mine), 1) as spill:
        assert stat.S_IMODE(mine.stat().st_mode) == 0o700
        assert pathlib.Path(spill.folder).parent == mine
        refused(mine, "no other job")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refused(mine, "of this user")
    with pytest.raises(InputError, match="of this user"):
        poisson_batching._spill_folder(str(tmp_path / "o"), str(mine), "public")


def test_the_shuffle_is_gone_before_the_job_counts_as_finished(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, delete = jobs.folder / "scratch", storage.delete_folder

    def killed(path: StrPath) -> None:
        if str(path).startswith(str(scratch)):
            raise KeyboardInterrupt
        delete(path)

    monkeypatch.setattr(storage, "delete_folder", killed)
    with pytest.raises(KeyboardInterrupt):
        jobs.write(scratch=scratch)
    assert len(os.listdir(scratch)) == 1
    monkeypatch.setattr(storage, "delete_folder", delete)
    out = jobs.write(scratch=scratch)  # the same command cleans up
    assert not os.listdir(scratch)
    assert verify(out).findings == ()
