"""A run whose folder is in a store goes on from there, on any machine."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.batches.folder import MANIFEST_NAME
from pipelines.files import storage
from tests.conftest import S3Requests
from tests.trainer.run.whole_runs import (
    AVERAGES,
    LINEAR,
    PUBLISHING,
    Chain,
    Planted,
    check_complete,
    private_settings,
    same_results,
)
from trainer.core.run.redact_errors import InterruptedRunError
from trainer.core.run.run_record import read_run
from trainer.core.step.dp_step import Step
from trainer.report.progress import Silent
from trainer.run.preflight import Request
from trainer.run.stored_run import StoreError, fetch
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

RECORD = "run_record.json"
CHECKPOINTS = "private/checkpoints"
RUN_ID = "private/run.id"
_SETTINGS = private_settings(**PUBLISHING)


class Store:
    """A folder in a store, and the changes of it that a run asks for."""

    def __init__(self, url: str, patch: pytest.MonkeyPatch) -> None:
        self.url = url
        self.changes: list[str] = []
        self._killed_at: int | None = None
        self._write = storage.write_atomically
        for name in ("create", "delete", "write_atomically"):
            patch.setattr(storage, name, self._seen(getattr(storage, name), place=0))
        copy = self._seen(storage.copy_to_store, place=1)
        patch.setattr(storage, "copy_to_store", copy)

    def _seen(self, change: Callable[..., Any], place: int) -> Callable[..., Any]:
        def changing(*given: Any, **more: Any) -> Any:
            if str(given[place]).startswith(f"{self.url}/"):
                self.changes.append(given[place].removeprefix(f"{self.url}/"))
                if self._killed_at is not None and len(self.changes) >= self._killed_at:
                    raise Planted
            return change(*given, **more)

        return changing

    @property
    def files(self) -> dict[str, bytes]:
        """Contents by name."""
        names = storage.walk(self.url)
        return {name: storage.read_bytes(f"{self.url}/{name}") for name in names}

    def restart(self, files: dict[str, bytes], *, killed_at: int | None = None) -> None:
        """Replaces the files; a process is killed at the change of that number."""
        storage.delete_folder(self.url)
        for name, data in files.items():
            self.put(name, data)
        self.changes.clear()
        self._killed_at = killed_at

    def put(self, name: str, data: bytes) -> None:
        self._write(f"{self.url}/{name}", data)


@pytest.fixture
def store(s3_folder: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty folder in a store."""
    return Store(s3_folder, monkeypatch)


@pytest.fixture
def stored(request_for: Any, store: Store) -> Callable[..., Request]:
    """Requests of one run, each made on a machine of its own."""

    def make(**changes: Any) -> Request:
        fields = {"settings": _SETTINGS, "checkpoint_every": 3, "store": store.url}
        return request_for(f"machines/{uuid.uuid4().hex}", **{**fields, **changes})

    return make


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    """Contents of a folder by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def public(files: dict[str, bytes]) -> dict[str, bytes]:
    """All but the checkpoints, which are in the store alone."""
    return {n: data for n, data in files.items() if not n.startswith(CHECKPOINTS)}


def test_the_objects_of_a_finished_run_are_the_files_of_the_run_here(
    stored: Any, store: Store
) -> None:
    request = stored(settings=private_settings(**AVERAGES, model=LINEAR))
    summary = train(request)
    assert public(store.files) == files_of(request.run)
    assert summary.run == store.url
    # A commit comes before its files, the record that the run is complete last.
    changes = [name for name in store.changes if not name.endswith(".npz")]
    commits = [n for n, name in enumerate(changes) if name.startswith(CHECKPOINTS)]
    assert changes.index(RECORD) > commits[0]
    assert [name for name in changes if not name.startswith("private")][-1] == RECORD
    assert not any(name.endswith((".npz", "may_go_on")) for name in store.files if (
        name.startswith("private")
    ))  # fmt: skip


@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_on_another_machine(
    stored: Any, store: Store, chain: Chain
) -> None:
    """Killed at changes of the store, and each time on a new machine."""
    first = store.files
    train(stored())
    total = len(store.changes)
    for number in (total // 2, total - 3):
        chain.states.clear()
        store.restart(first, killed_at=number)
        with pytest.raises(Planted):
            train(stored())
        store.restart(store.files)
        request = stored()
        if json.loads(store.files.get(RECORD, b'{"complete": false}'))["complete"]:
            with pytest.raises(InputError, match="a finished run"):
                train(request)
            continue
        train(request)
        check_complete(request.run, chain)
        assert public(store.files) == files_of(request.run), number


def test_of_two_machines_that_go_on_one_is_stopped_at_its_commit(
    stored: Any, store: Store, chain: Chain, crash: Any
) -> None:
    """While one is within a step, the other takes it over, and ends the run."""
    crash(stored(), 5)
    other, results = stored(), []

    class Slow(Silent):
        def advance(self, done: int) -> None:
            if done == 5:
                train(other)
                results.append(store.files)

    with pytest.raises(InterruptedRunError, match="another one has gone on"):
        train(stored(), Slow())
    check_complete(other.run, chain)
    assert store.files == results[0]


def test_of_two_runs_in_one_folder_one_is_stopped(
    stored: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = b"4" * 32 + b"\n"
    finish = Step.finish

    def overtaken(self: Step, settle: Any) -> Any:
        store.put(RUN_ID, other)
        return finish(self, settle)

    monkeypatch.setattr(Step, "finish", overtaken)
    with pytest.raises(StoreError, match=f"{store.url}.*another run"):
        train(stored())
    assert store.files[RUN_ID] == other
    entries = [n for n in store.files if n.startswith(CHECKPOINTS) and "json" in n]
    assert len(entries) == 1  # that before the first step


def test_what_cannot_be_the_folder_is_refused_before_any_work(
    stored: Any, store: Store
) -> None:
    store.put(RUN_ID, b"1")
    store.put(RECORD, b"{}")
    with pytest.raises(InputError, match="run record"):
        fetch(stored())
    store.put("else", b"")
    with pytest.raises(InputError, match=f"{store.url} to be new or empty"):
        fetch(stored())
    request = stored()
    request.run.mkdir(parents=True)
    (request.run / "else").touch()
    with pytest.raises(InputError, match="to be empty, since"):
        fetch(request)
    with pytest.raises(InputError, match="name a folder in a bucket"):
        fetch(stored(store="s3://host"))
    assert not store.changes


@pytest.fixture
def stored_batches(small_batches: Any, s3_folder: str) -> str:
    """``small_batches`` in an object store."""
    for path in small_batches.path.rglob("*.*"):
        name = path.relative_to(small_batches.path).as_posix()
        storage.copy_to_store(path, f"{s3_folder}/{name}")
    return s3_folder


@pytest.mark.usefixtures("one_secret")
def test_a_run_whose_store_fails_goes_on_and_ends_with_the_bytes_of_one_here(
    request_for: Any,
    stored_batches: str,
    small_batches: Any,
    tmp_path: pathlib.Path,
    s3_requests: S3Requests,
) -> None:
    files = small_batches.manifest.files
    s3_requests.busy(1 << 30, files[2].name)
    settings = private_settings(optimizer="sgd", model=LINEAR)
    given = {"settings": settings, "checkpoint_every": 1}
    with pytest.raises(InputError, match="goes on from its last checkpoint") as error:
        train(request_for("there", batches=stored_batches, **given))
    assert "quotes" not in str(error.value)
    # Of ten, four in a file: the next batch says that a step is whole.
    assert read_run(tmp_path / "there")[0].num_steps_executed == 7
    s3_requests.fail = lambda *_: None
    s3_requests.asked.clear()
    train(request_for("there", batches=stored_batches, **given))
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
