"""A run on batches in a store has the results of a run on the same batches here."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.batches.folder import MANIFEST_NAME
from pipelines.files import storage
from tests.conftest import S3Requests
from tests.trainer.run.whole_runs import LINEAR, private_settings, same_results
from trainer.core.run.run_record import read_run
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results", "one_secret")


@pytest.fixture
def stored(small_batches: Any, s3_folder: str) -> str:
    """``small_batches`` in an object store."""
    for path in small_batches.path.rglob("*.*"):
        name = path.relative_to(small_batches.path).as_posix()
        storage.copy_to_store(path, f"{s3_folder}/{name}")
    return s3_folder


def test_a_run_whose_store_fails_goes_on_and_ends_with_the_bytes_of_one_here(
    request_for: Any,
    stored: str,
    small_batches: Any,
    tmp_path: pathlib.Path,
    s3_requests: S3Requests,
) -> None:
    files = small_batches.manifest.files
    s3_requests.busy(1 << 30, files[2].name)
    settings = private_settings(optimizer="sgd", model=LINEAR)
    given = {"settings": settings, "checkpoint_every": 1}
    with pytest.raises(InputError, match="goes on from its last checkpoint") as error:
        train(request_for("there", batches=stored, **given))
    assert "quotes" not in str(error.value)
    # Of ten, four in a file: the next batch says that a step is whole.
    assert read_run(tmp_path / "there")[0].num_steps_executed == 7
    s3_requests.fail = lambda *_: None
    s3_requests.asked.clear()
    train(request_for("there", batches=stored, **given))
    read = [given["Key"] for name, given in s3_requests.asked if name == "GetObject"]
    assert {name.split("/", 1)[1] for name in read} == {
        MANIFEST_NAME, "private/checksums.json", files[1].name, files[2].name,
    }  # fmt: skip
    written = [given["Key"] for name, given in s3_requests.asked if "Put" in name]
    assert {name.split("/", 1)[1] for name in written} <= {"private/used_by.json"}
    train(request_for("here", **given))
    assert same_results(tmp_path / "here", tmp_path / "there")
    here, there = (read_run(tmp_path / name)[0] for name in ("here", "there"))
    assert here == dataclasses.replace(there, num_commits=here.num_commits)
