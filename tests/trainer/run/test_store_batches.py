"""A run on batches in a store has the results of a run on the same batches here."""

from __future__ import annotations

import dataclasses
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from apache_beam.utils import retry

from accounting.core.validation import InputError
from pipelines.batches.folder import CERTIFICATE_NAME, MANIFEST_NAME
from pipelines.batches.stored import stored as in_folder
from tests.pipelines.memory_stores import MemoryStore
from tests.trainer.run.whole_runs import LINEAR, private_settings, same_results
from trainer.core.run.batches import BatchSource
from trainer.core.run.run_record import read_run
from trainer.run.preflight import check
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results", "one_secret")


@pytest.fixture
def stored(small_batches: Any) -> Iterator[str]:
    """``small_batches`` in an object store."""
    place = f"memory://host/{uuid.uuid4().hex}"
    for path in small_batches.path.rglob("*.*"):
        name = path.relative_to(small_batches.path).as_posix()
        MemoryStore.objects[f"{place}/{name}"] = path.read_bytes()
    yield place
    MemoryStore.listeners.clear()


def test_batches_of_a_store_are_those_here(small_batches: Any, stored: str) -> None:
    pairs = zip(
        BatchSource(in_folder(stored), small_batches.manifest, first_step=3),
        BatchSource(
            in_folder(small_batches.path), small_batches.manifest, first_step=3
        ),
        strict=True,
    )
    for there, here in pairs:
        assert (there["step"], there["part"]) == (here["step"], here["part"])
        for name, values in here["columns"].items():
            found = there["columns"][name]
            assert found.numpy().tobytes() == values.numpy().tobytes()


def test_a_run_whose_store_fails_goes_on_and_ends_with_the_bytes_of_one_here(
    request_for: Any,
    stored: str,
    small_batches: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, opened, fails = small_batches.manifest.files, [], True

    def listen(operation: str, path: str) -> None:
        opened.append((operation, path.removeprefix(f"{stored}/")))
        if fails and path.endswith(files[2].name):
            raise ConnectionError("quotes an address")

    MemoryStore.listeners.append(listen)
    monkeypatch.setattr(retry.Clock, "sleep", lambda self, seconds: None)
    settings = private_settings(optimizer="sgd", model=LINEAR)
    given = {"settings": settings, "checkpoint_every": 1}
    with pytest.raises(InputError, match="goes on from its last checkpoint") as error:
        train(request_for("there", batches=stored, **given))
    assert "quotes" not in str(error.value)
    # Of ten, four in a file: the next batch says that a step is whole.
    assert read_run(tmp_path / "there")[0].num_steps_executed == 7
    fails = False
    opened.clear()
    train(request_for("there", batches=stored, **given))
    assert {name for _, name in opened} == {
        MANIFEST_NAME, CERTIFICATE_NAME, "private/checksums.json", files[1].name,
        files[2].name,
    }  # fmt: skip
    assert {operation for operation, _ in opened} == {"open"}  # nothing is written
    train(request_for("here", **given))
    assert same_results(tmp_path / "here", tmp_path / "there")
    here, there = (read_run(tmp_path / name)[0] for name in ("here", "there"))
    assert here == dataclasses.replace(there, num_commits=here.num_commits)


def test_an_object_that_is_missing_is_refused_before_any_work(
    request_for: Any, stored: str, small_batches: Any, tmp_path: pathlib.Path
) -> None:
    name = small_batches.manifest.files[1].name
    del MemoryStore.objects[f"{stored}/{name}"]
    with pytest.raises(InputError, match=f"{stored}/{name}.*missing"):
        check(request_for(batches=stored))
    with pytest.raises(InputError, match=r"holds no finished batches"):
        check(request_for(batches=f"{stored}/else"))
    with pytest.raises(InputError, match="name a folder in a bucket"):
        check(request_for(batches="memory://host"))
    with pytest.raises(InputError, match="as text"):
        request_for(batches=pathlib.Path(stored))
    assert not (tmp_path / "run").exists()
