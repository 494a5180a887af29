"""Guarantees of pipelines.inputs.unfinished_job."""

from __future__ import annotations

import pathlib
import stat

import pytest

from accounting.validation import InputError
from pipelines.inputs import unfinished_job

JOB = {"input": "00ff", "rows": 3}


def test_the_same_job_continues_and_another_one_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "job.json"
    begun = unfinished_job.begin_or_continue(path, JOB, "input or rows", parts=4)
    written = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert begun["parts"] == 4
    # The recorded value counts, not a later one.
    again = unfinished_job.begin_or_continue(path, JOB, "input or rows", parts=5)
    assert again == begun
    for ask in (unfinished_job.begin_or_continue, unfinished_job.check):
        with pytest.raises(InputError, match="its input or rows were others") as error:
            ask(path, {**JOB, "rows": 4}, "input or rows")
        assert str(tmp_path) in str(error.value)
    assert path.read_bytes() == written


def test_a_record_holds_a_digest_and_not_the_description(
    tmp_path: pathlib.Path,
) -> None:
    unfinished_job.record(tmp_path / "job.json", JOB)
    assert b"00ff" not in (tmp_path / "job.json").read_bytes()


@pytest.mark.parametrize("content", [b"[]", b"{}", b"{", None])
def test_a_folder_without_a_record_is_not_taken_for_a_job(
    content: bytes | None, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "job.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError):
        unfinished_job.check(path, JOB, "input or rows")
