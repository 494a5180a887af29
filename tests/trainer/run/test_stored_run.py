"""A run whose folder is in a store is the run here, also after kills and failures."""

from __future__ import annotations

import pathlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from apache_beam.utils import retry

from accounting.core.validation import InputError
from tests.pipelines.memory_stores import STORES
from tests.trainer.run.whole_runs import (
    AVERAGES,
    LINEAR,
    ONE_ID,
    Planted,
    private_settings,
)
from trainer.core.step.dp_step import Step
from trainer.run.preflight import Request
from trainer.run.stored_run import StoreError, fetch
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

RECORD = "run_record.json"
CHECKPOINT = "private/checkpoint.npz"
RUN_ID = "private/run.id"
_SETTINGS = private_settings(optimizer="sgd", model=LINEAR)


class Store:
    """A folder in a store, and what happens in it."""

    def __init__(self, scheme: str) -> None:
        self.url = f"{scheme}://host/{uuid.uuid4().hex}"
        self.kind = STORES[scheme]
        self.changes: list[str] = []
        #: The files before each change, which a kill at it leaves.
        self.before: list[dict[str, bytes]] = []
        self._killed_at: int | None = None
        # With folders a file appears under a hidden name, and is renamed.
        self._change = "rename" if self.kind.DIRS else "appear"

    def __call__(self, operation: str, path: str) -> None:
        if operation not in (self._change, "delete") or not path.startswith(self.url):
            return
        self.before.append(self.files)
        self.changes.append(path.removeprefix(f"{self.url}/"))
        if self._killed_at is not None and len(self.changes) >= self._killed_at:
            raise Planted

    @property
    def files(self) -> dict[str, bytes]:
        """Contents by name, but of what a killed process left unfinished."""
        found = {**self.kind.objects}
        start = f"{self.url}/"
        return {
            path.removeprefix(start): data
            for path, data in found.items()
            if path.startswith(start) and "/." not in path
        }

    def restart(self, files: dict[str, bytes], *, killed_at: int | None = None) -> None:
        """Replaces the files; a process is killed at the change of that number."""
        self._killed_at = None
        for name in self.files:
            del self.kind.objects[f"{self.url}/{name}"]
        for name, data in files.items():
            self.put(name, data)
        self.changes.clear()
        self.before = []
        self._killed_at = killed_at

    def put(self, name: str, data: bytes) -> None:
        path = f"{self.url}/{name}"
        folder, store = path.rpartition("/")[0], self.kind(None)
        if store.has_dirs() and not store.exists(folder):
            store.mkdirs(folder)
        self.kind.objects[path] = data


@pytest.fixture
def store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """An empty folder in a store, which already knows the id of the run to come."""
    monkeypatch.setattr(retry.Clock, "sleep", lambda self, seconds: None)
    found = Store(getattr(request, "param", "memory"))
    found.put(RUN_ID, f"{ONE_ID}\n".encode())
    found.kind.listeners.append(found)
    yield found
    found.kind.listeners.clear()


#: Runs a test in an object store, and in a store with folders.
in_each_store = pytest.mark.parametrize("store", STORES, indirect=True)


@pytest.fixture
def stored(
    request_for: Any, store: Store, tmp_path: pathlib.Path
) -> Callable[..., Request]:
    """Requests of one run, each made on a machine of its own."""

    def make(**changes: Any) -> Request:
        fields = {"settings": _SETTINGS, "checkpoint_every": 3, "store": store.url}
        return request_for(f"machines/{uuid.uuid4().hex}", **{**fields, **changes})

    return make


def without_models(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files that do not name the time at which they were written."""
    return {name: data for name, data in files.items() if "model" not in name}


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    """Contents of a folder by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_objects_of_a_finished_run_are_the_files_of_the_run_here(
    stored: Any, store: Store, tmp_path: pathlib.Path
) -> None:
    """But for the noise key, which is not copied."""
    request = stored(settings=private_settings(**AVERAGES, model=LINEAR))
    summary = train(request)
    assert store.files == files_of(request.run)
    assert summary.run == store.url
    # An iterate comes before the checkpoint that needs it, the record after results.
    iterate = store.changes.index("iterates/step-00000006.npz")
    saves = [n for n, name in enumerate(store.changes) if name == CHECKPOINT]
    assert saves[1] < iterate < saves[2]  # of steps 3 and 6
    assert store.changes[-2:] == [RECORD, CHECKPOINT]  # which is deleted
    key = (tmp_path / "noise.key").read_bytes().strip()
    assert not [name for name, data in store.files.items() if key in data]
    with pytest.raises(InputError, match="does not keep the noise key"):
        stored(noise_key_file=None)


def check_kills(
    stored: Any, store: Store, here: Request, numbers: Callable[[int], Iterable[int]]
) -> list[dict[str, bytes]]:
    """Returns the files before each change of the whole run."""
    train(here)
    expected = without_models(files_of(here.run))
    train(stored())
    assert without_models(store.files) == expected
    left, total = store.before, len(store.changes)
    for number in numbers(total):
        store.restart(left[number - 1])
        train(stored())
        assert without_models(store.files) == expected, number
    with pytest.raises(InputError, match="a finished run"):
        train(stored())
    return left


@pytest.fixture
def here(request_for: Any) -> Request:
    """The same run in a folder here."""
    return request_for("here", run_id=ONE_ID, settings=_SETTINGS, checkpoint_every=3)


def test_a_run_killed_at_any_moment_goes_on_elsewhere_with_the_same_bytes(
    stored: Any, store: Store, here: Request
) -> None:
    check_kills(stored, store, here, lambda total: (total // 2, total - 1))


@pytest.mark.thorough
@in_each_store
def test_a_run_killed_at_each_change_of_the_store_goes_on(
    stored: Any, store: Store, here: Request
) -> None:
    first = store.files
    left = check_kills(stored, store, here, lambda total: range(1, total))
    # A kill does leave what was there before the change.
    store.restart(first, killed_at=len(left))
    with pytest.raises(Planted):
        train(stored())
    assert without_models(store.files) == without_models(left[-1])


def test_the_id_is_in_the_store_before_the_first_step(
    stored: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    del store.kind.objects[f"{store.url}/{RUN_ID}"]

    def crash(self: Step) -> None:
        assert store.files[RUN_ID]
        raise Planted

    monkeypatch.setattr(Step, "finish", crash)
    with pytest.raises(Planted):
        train(stored())


def test_of_two_runs_in_one_folder_one_is_stopped(
    stored: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = b"4" * 32 + b"\n"
    monkeypatch.setattr(Step, "finish", lambda self: store.put(RUN_ID, other))
    with pytest.raises(StoreError, match=f"{store.url}.*another run"):
        train(stored())
    assert store.files[RUN_ID] == other
    assert store.changes.count(CHECKPOINT) == 1  # that before the first step


def test_a_store_that_fails_is_asked_again_and_one_that_refuses_is_not(
    stored: Any, store: Store
) -> None:
    failures = [ConnectionError("quotes an address")] * 3

    def fail(operation: str, path: str) -> None:
        if operation == "create" and path.endswith(RECORD) and failures:
            raise failures.pop()

    store.kind.listeners.append(fail)
    train(stored())
    assert not failures
    store.restart({})
    refusal = OSError("quotes an address")
    refusal.code = 403  # type: ignore[attr-defined]
    failures.extend([refusal] * 2)
    with pytest.raises(StoreError, match=f"{RECORD}.*answered.*give the same") as error:
        train(stored())
    assert "quotes" not in str(error.value)
    assert len(failures) == 1


def test_what_cannot_be_the_folder_is_refused_before_any_work(
    stored: Any, store: Store, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(InputError, match=r"noise.key to exist"):
        fetch(stored(noise_key_file=tmp_path / "other" / "noise.key"))
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
        fetch(stored(store="memory://host"))
    assert not store.changes
