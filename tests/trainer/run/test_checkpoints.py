"""The chain of commits: what was committed last is read, or nothing is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.run.whole_runs import Planted
from trainer.core.run.checkpoints import Checkpoints, Files, State
from trainer.core.run.redact_errors import InterruptedRunError

FOLDER = "run/private/checkpoints"


class Disk:
    """Files in memory; a process is killed before the change of a given number."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.killed_at = killed_at

    def _change(self) -> None:
        if self.killed_at is not None:
            self.killed_at -= 1
            if self.killed_at < 0:
                raise Planted

    def create(self, path: str, data: bytes) -> bool:
        self._change()
        is_new = path not in self.files
        self.files.setdefault(path, bytes(data))
        return is_new

    def read(self, path: str) -> bytes:
        try:
            return self.files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def names(self, folder: str) -> set[str]:
        start = f"{folder}/"
        within = (p.removeprefix(start) for p in self.files if p.startswith(start))
        return {name for name in within if "/" not in name}

    def remove(self, path: str) -> None:
        self._change()
        self.files.pop(path, None)

    def run(self) -> Checkpoints:
        return Checkpoints(
            "run",
            Files(
                create=self.create, read=self.read, names=self.names,
                make_folder=lambda folder: None, remove=self.remove,
            ),
        )  # fmt: skip


def state(step: int) -> State:
    arrays = {"weight": np.full(3, step / 7, "f4"), "count": np.array(step)}
    return State(step=step, arrays=arrays, public={"fits": [{"loss": 0.1 * step}]})


def same(found: State | None, wanted: State) -> bool:
    return found is not None and found.step == wanted.step and (
        found.public == wanted.public and [*found.arrays] == [*wanted.arrays]
    ) and all(
        found.arrays[name].tobytes() == array.tobytes()
        for name, array in wanted.arrays.items()
    )  # fmt: skip


def committed(*steps: int) -> Disk:
    disk = Disk()
    run = disk.run()
    for step in steps:
        run.commit(state(step))
    return disk


def test_the_last_commit_is_read_and_one_file_of_arrays_is_kept() -> None:
    assert Disk().run().last() is None
    disk = committed(0, 4, 4, 9)
    run = disk.run()
    assert same(run.last(), state(9))
    assert run.number == 4
    assert sum(name.endswith(".npz") for name in disk.names(FOLDER)) == 1
    run.check_may_go_on(state(9))
    run.end()
    with pytest.raises(InputError, match="ended for good at step 9"):
        disk.run().check_may_go_on(state(9))


def test_a_kill_at_any_change_leaves_the_commit_before_or_its_own() -> None:
    """Never an older one; and the run goes on from there."""
    for kill in itertools.count():
        disk, step, is_killed = Disk(killed_at=kill), 0, False
        run = disk.run()
        try:
            for step in (1, 2, 3):
                run.commit(state(step))
        except Planted:
            is_killed = True
        disk.killed_at = None
        again = disk.run()
        found = again.last()
        if step > 1 or found is not None:
            assert found is not None
            assert found.step in (step - is_killed, step)
            assert same(found, state(found.step))
        again.commit(state(9))
        copy = Disk()
        copy.files = {**disk.files}
        assert same(copy.run().last(), state(9))
        copy.run().check_may_go_on(state(9))
        again.finish()
        assert not any(name.endswith(".npz") for name in disk.names(FOLDER))
        if not is_killed:
            assert kill == 1 + 2 + 3 + 3  # a token; arrays, entry, and a removal
            return


def _flip(place: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        flipped = bytearray(data)
        flipped[place] ^= 1
        return bytes(flipped)

    return flip


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "first byte": _flip(0),
    "a later byte": _flip(21),
    "last byte": _flip(-1),
    "no object": lambda data: b"[]",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ending", ["json", "npz"])
def test_a_damaged_last_commit_is_refused(ending: str, damage: str) -> None:
    """Seen to fail: half an entry was an error of JSON, another step was believed."""
    disk = committed(1, 2)
    name = max(n for n in disk.names(FOLDER) if n.endswith(ending))
    path = f"{FOLDER}/{name}"
    changed = DAMAGES[damage](disk.files.pop(path))
    if changed is not None:
        disk.files[path] = changed
    before = dict(disk.files)
    with pytest.raises(InputError, match=r"missing or damaged.* older one") as error:
        disk.run().last()
    assert "\n" not in str(error.value)
    assert disk.files == before


def test_of_two_that_commit_after_the_same_commit_one_does() -> None:
    disk = committed(1)
    first, second = disk.run(), disk.run()
    first.last()
    second.last()
    second.commit(state(3))
    with pytest.raises(InterruptedRunError, match="another one has gone on"):
        first.commit(state(2))
    assert same(disk.run().last(), state(3))
    second.commit(state(4))
    disk.run().check_may_go_on(state(4))


def test_a_store_whose_answer_was_lost_has_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen to fail: asked again, it had the file, and the winner gave up its arrays."""
    disk = committed(1)
    run = disk.run()
    run.last()
    create = disk.create

    def twice(path: str, data: Any) -> bool:
        create(path, data)
        return create(path, data)

    monkeypatch.setattr(disk, "create", twice)
    run = disk.run()
    run.last()
    run.commit(state(2))
    assert same(disk.run().last(), state(2))
