"""A run that goes on is the run that was never interrupted: theorem of ``checkpoints``.

Kills of whole processes are in ``test_two_at_once``, several workers in
``claims/workers/test_runs``, stores in ``test_stored_run``.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import errno
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.files import storage
from pipelines.files.processes import StoppedError
from tests.command_line import invoke
from tests.trainer.conftest import make_rows, write_held_out
from tests.trainer.run.whole_runs import (
    AVERAGES,
    LINEAR,
    PUBLISHING,
    Chain,
    Planted,
    check_complete,
    private_model,
    private_settings,
    same_results,
)
from trainer import train as train_module
from trainer.core.run import session as session_module
from trainer.core.run.checkpoints import Checkpoints
from trainer.core.run.redact_errors import InterruptedRunError
from trainer.core.run.run_record import read_run
from trainer.core.run.session import Session
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import keras
from trainer.keras_model import PrivateModel
from trainer.model.evaluation import Evaluator
from trainer.report.progress import Silent
from trainer.run.iterates import Iterates
from trainer.train import train
from trainer.training_loop import Training

pytestmark = pytest.mark.usefixtures("lean_results")


@pytest.fixture
def request_for(request_for: Any) -> Any:
    def make(name: str = "run", **changes: Any) -> Any:
        given = {"settings": private_settings(**PUBLISHING), "checkpoint_every": 3}
        return request_for(name, **{**given, **changes})

    return make


@contextlib.contextmanager
def killed(owner: Any, name: str, *, call: int = 1, after: bool) -> Iterator[None]:
    """Kills, as far as a run can tell, at a call of a function, or after it."""
    original, count = getattr(owner, name), 0

    def die(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            raise Planted
        found = original(*arguments, **more)
        if count == call:
            raise Planted
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Planted):
            yield


# -- C5: after the commit --------------------------------------------------------------


class Watch:
    """Whoever looks at a state, which has to be the last committed one.

    Attributes:
      seen: What looked -> the steps of the states.
      current: The session of the attempt; empty before.
    """

    def __init__(self, chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, list[int]] = collections.defaultdict(list)
        self.current: list[Session] = []
        self._chain, self._monkeypatch = chain, monkeypatch
        begin = Session.open
        monkeypatch.setattr(
            Session,
            "open",
            lambda s, *a, **m: (self.current.append(s), begin(s, *a, **m))[1],
        )
        for owner, name in (
            (Session, "write_record"), (Iterates, "keep"), (Evaluator, "metrics"),
            (PrivateModel, "evaluate"),
        ):  # fmt: skip
            self._watch(owner, name)

    def look(self, what: str) -> None:
        assert self._chain.step == self.current[0].num_steps_executed, what
        self.seen[what].append(self._chain.step)

    def _watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **more: Any) -> Any:
            self.look(name)
            return original(*arguments, **more)

        self._monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def watch(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """What is public looks at committed states alone, but for the progress."""
    return Watch(chain, monkeypatch)


def test_no_file_or_line_of_train_precedes_the_commit_that_it_speaks_of(
    request_for: Any, chain: Chain, watch: Watch
) -> None:
    class Said(Silent):
        def say(self, text: str) -> None:
            if watch.current and chain.states and "after step" in text:
                watch.look("line")

    request = request_for()
    with killed(Session, "write_record", call=3, after=True):
        train(request, Said())
    watch.current.clear()
    train(request, Said())
    assert watch.seen["metrics"][:4] == [0, 4, 8, 10]  # and those of kept iterates
    # Four of the first attempt; the other one begins with that of step 4.
    assert watch.seen["write_record"][:4] == [0, 3, 4, 4]
    assert watch.seen["line"] == [4]
    check_complete(request.run, chain)


def test_no_file_or_callback_of_fit_precedes_the_commit_that_it_speaks_of(
    small_batches: Any, tmp_path: pathlib.Path, watch: Watch
) -> None:
    class Seeing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            watch.look("callback")

        on_train_begin = on_train_end = on_epoch_begin = (  # type: ignore[assignment]
            lambda self, *_, **__: watch.look("callback")
        )

    model = private_model(
        small_batches, tmp_path / "run", keep_last=2, keep_every=3, checkpoint_every=3
    )
    rows = make_rows(20)
    data = {"integers": rows["integers"]}, rows["label"]
    model.fit(steps_per_epoch=4, validation_data=data, callbacks=[Seeing()], verbose=0)
    assert watch.seen["evaluate"] == [4, 8, 10]
    assert watch.seen["keep"] == [7, 10]
    assert watch.seen["callback"] == [0, 0, 4, 4, 8, 8, 10, 10]


def test_a_run_killed_wherever_it_commits_and_publishes_ends_complete(
    request_for: Any, chain: Chain
) -> None:
    """What a kill cut short is made again, from the commit."""
    request = request_for(
        settings=private_settings(**PUBLISHING, ema_decay=0.9, export=("upa",))
    )
    for owner, name, call, after in (
        (Checkpoints, "commit", 1, False),
        (Checkpoints, "commit", 1, True),
        (Session, "write_record", 1, False),
        (Evaluator, "metrics", 1, True),
        (storage, "create", 5, False),  # between the arrays and their commit
        (Checkpoints, "commit", 3, True),  # of step 4, which is to be evaluated
        (Iterates, "keep", 1, False),
        (Evaluator, "metrics", 1, False),
        (Evaluator, "metrics", 1, True),
        (Session, "write_record", 2, True),
        (train_module, "export", 1, False),
        (train_module, "export", 2, True),
        (train_module, "write_atomically", 1, True),
        (Session, "write_record", 2, False),  # that it is complete
    ):
        with killed(owner, name, call=call, after=after):
            train(request)
    (request.run / ".0a.saved_model").mkdir()
    for name in (".0a.saved_model/part", ".0b.model.keras", "private/.0c.run.id"):
        (request.run / name).write_bytes(b"half")
    train(request)
    assert not list(request.run.rglob(".*"))
    check_complete(request.run, chain)
    with pytest.raises(InputError, match="a finished run"):
        train(request)


# -- C1 and C2: noise of its own, and a state that is complete -------------------------


def test_a_step_that_is_taken_again_has_new_noise_and_no_file_the_secret(
    request_for: Any, crash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets: list[bytes] = []
    drawn: dict[int, list[bytes]] = collections.defaultdict(list)
    new, execute = session_module.new_secret, Session.execute

    def keep() -> bytes:
        secrets.append(new())
        return secrets[-1]

    def execute_and_keep(self: Session, noise: Any, *rest: Any, **more: Any) -> Any:
        drawn[self.num_steps_executed].extend(one.tobytes() for one in noise)
        return execute(self, noise, *rest, **more)

    monkeypatch.setattr(session_module, "new_secret", keep)
    monkeypatch.setattr(Session, "execute", execute_and_keep)
    request = request_for(checkpoint_every=5, settings=private_settings(model=LINEAR))
    crash(request, 9)
    folders = [p.read_bytes() for p in request.run.rglob("*") if p.is_file()]
    train(request)
    folders += [p.read_bytes() for p in request.run.rglob("*") if p.is_file()]
    assert len(drawn[0]) == 2  # of two variables
    assert len(drawn[9]) == 4  # it was begun twice
    of_all = [noise for found in drawn.values() for noise in found]
    assert len(set(of_all)) == len(of_all)
    assert len(secrets) == 2
    for secret in secrets:
        for text in (secret, secret.hex().encode(), base64.b64encode(secret)):
            assert not any(text in data for data in folders)


@pytest.mark.usefixtures("one_secret")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "optimizer": "adam", "learning_rate_schedule": "cosine", "warmup_steps": 2,
            "l2_norm_clip": None,
        },
        {"method": "dp-sat", "sat_radius": 0.1},
        {
            "method": "model-mix", "mix_width": 0.1, "linf_factor": 4,
            "optimizer": "sgd", "learning_rate_schedule": "linear",
            "train_over": None, "aggregate_from": None,
        },
    ],
)  # fmt: skip
def test_a_commit_holds_all_that_a_run_goes_on_with(
    changes: dict[str, Any], request_for: Any, tmp_path: pathlib.Path, crash: Any
) -> None:
    """Under one secret, which the test injects, it has the bits of the whole run."""
    feedback = {"train_over": "uta", "aggregate_from": 4}
    given = {"model": LINEAR, **AVERAGES, **feedback, **changes}
    settings = private_settings(**given)
    train(request_for("whole", settings=settings))
    request = request_for("broken", settings=settings)
    crash(request, 8)
    train(request)
    assert same_results(tmp_path / "whole", tmp_path / "broken")


# -- C3: what ends a run for good ------------------------------------------------------


class FailedError(ValueError):
    """An error of somebody's code."""


def fails(*_: Any, **__: Any) -> None:
    raise FailedError


def _at(owner: Any, name: str, call: int, error: BaseException) -> Callable[..., Any]:
    """Returns what makes the call of a function raise an error, once."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original, count = getattr(owner, name), 0

        def called(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                raise error
            return original(*arguments, **more)

        patch.setattr(owner, name, called)

    return plant


ENDS = {
    "the step": _at(Step, "add", 6, FailedError()),
    "a metric": _at(Evaluator, "metrics", 2, FailedError()),
    "values": lambda patch: patch.setattr(
        Training, "commit", _with_a_weight_that_is_no_number(Training.commit)
    ),
}

INTERRUPTS = {
    "Ctrl-C": _at(Step, "add", 6, KeyboardInterrupt()),
    "a signal": _at(Step, "finish", 6, StoppedError("Stopped.", 15)),
    "a full disk": _at(storage, "create", 6, OSError(errno.ENOSPC, "No space")),
    "files": _at(Step, "add", 6, InterruptedRunError("Expected a file.")),
    "code before the first step": _at(Evaluator, "metrics", 1, FailedError()),
}


def _with_a_weight_that_is_no_number(commit: Any) -> Any:
    def committed(training: Training) -> None:
        if training.session.num_steps_executed >= 6:
            training._model.variables[0].assign(np.full((13, 1), np.nan))
        commit(training)

    return committed


@pytest.mark.parametrize("what", ENDS)
def test_an_error_of_code_or_values_ends_the_run_for_good(
    what: str, request_for: Any, crash: Any
) -> None:
    """Else it could be taken again until it does not occur; what it released counts."""
    request = request_for()
    crash(request, 5)
    with pytest.MonkeyPatch.context() as patch:
        ENDS[what](patch)
        with pytest.raises((InputError, FailedError)):
            train(request)
    for _ in range(2):
        with pytest.raises(InputError, match="ended for good at step") as error:
            train(request)
        assert "\n" not in str(error.value)
    record, _ = read_run(request.run)
    assert not record.complete
    assert 4 <= record.num_steps_executed < 10
    said = invoke(["account", str(request.run), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.output)["epsilon"] > 0


@pytest.mark.parametrize("what", INTERRUPTS)
def test_what_tells_nothing_of_values_interrupts_a_run(
    what: str, request_for: Any, chain: Chain
) -> None:
    request = request_for()
    with pytest.MonkeyPatch.context() as patch:
        INTERRUPTS[what](patch)
        with pytest.raises((KeyboardInterrupt, StoppedError, OSError, ValueError)):
            train(request)
    train(request)
    check_complete(request.run, chain)


def test_a_callback_that_fails_ends_a_run_and_a_disk_that_is_full_does_not(
    small_batches: Any, tmp_path: pathlib.Path, chain: Chain
) -> None:
    """In one process, and in the next one."""
    run = tmp_path / "run"
    model = private_model(small_batches, run, checkpoint_every=3)
    given = {"steps_per_epoch": 4, "verbose": 0}
    for call in (5, 10):  # arrays of the second commit, and a later entry
        with pytest.MonkeyPatch.context() as patch:
            _at(storage, "create", call, OSError(errno.ENOSPC, "No space"))(patch)
            with pytest.raises(OSError, match="No space"):
                model.fit(**given)
        assert model.num_steps_executed == chain.step
        for found, array in zip(
            model.network.get_weights(), chain.weights(chain.step), strict=True
        ):
            np.testing.assert_array_equal(found, array)
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epoch and fails()
    )
    with pytest.raises(FailedError):
        model.fit(callbacks=[callback], **given)
    with pytest.raises(InputError, match=r"for good"):
        model.fit(**given)
    with pytest.raises(InputError, match="ended for good at step 8"):
        private_model(small_batches, run, checkpoint_every=3).fit(**given)
    assert model.privacy_statement().epsilon.guarantee > 0
    assert read_run(run)[0].num_commits == len(chain.states)


# -- C4: one chain, never undone -------------------------------------------------------


def test_a_restored_older_checkpoint_beside_newer_public_files_is_refused(
    request_for: Any, crash: Any, tmp_path: pathlib.Path
) -> None:
    request = request_for()
    crash(request, 4)
    shutil.copytree(request.run / "private", tmp_path / "backup")
    crash(request, 5)  # after step 8
    shutil.copytree(request.run / "private", tmp_path / "newer")
    shutil.copytree(request.run / "private", tmp_path / "without")
    for path in (tmp_path / "without" / "checkpoints").iterdir():
        path.unlink()
    for backup, message in (
        ("backup", "of which its record tells"), ("without", "it is number 0"),
        ("newer", None),
    ):  # fmt: skip
        shutil.rmtree(request.run / "private")
        shutil.copytree(tmp_path / backup, request.run / "private")
        if message is None:
            train(request)
            continue
        with pytest.raises(InputError, match=message) as error:
            train(request)
        assert "\n" not in str(error.value)


# -- the same run ----------------------------------------------------------------------


def test_a_run_does_not_go_on_as_another_one(
    request_for: Any,
    crash: Any,
    tmp_path: pathlib.Path,
    small_batches: Any,
    batch_folder: Any,
    held_out: pathlib.Path,
    chain: Chain,
) -> None:
    crash(request_for(), 5)
    other_plan = batch_folder(small_batches.steps, "plan", num_examples=201)
    other_rows = [*small_batches.steps[:-1], small_batches.steps[0]]
    other_data = batch_folder(other_rows, "data")
    other = write_held_out(tmp_path / "other", make_rows(300, seed=98))
    settings: dict[str, dict[str, Any]] = {
        r"noise_multiplier=0\.9.*0\.8": {"noise_multiplier": 0.9},
        r"ema_decay=0\.9.*None": {"ema_decay": 0.9},
        "optimizer='adam' to be 'sgd'": {"optimizer": "adam"},
        "learning_rate=0.3": {"learning_rate": 0.3},
    }
    for changes, message in (
        *(
            ({"settings": private_settings(**{**PUBLISHING, **s})}, m)
            for m, s in settings.items()
        ),
        ({"batches": other_plan.path}, "plan="),
        ({"batches": other_data.path}, "batches="),
        ({"held_out": other}, "--eval="),  # or one curve would be of two sets
    ):
        with pytest.raises(InputError, match=message) as error:
            train(request_for(**changes))
        assert "\n" not in str(error.value)
    # The same examples elsewhere are the same.
    shutil.copytree(held_out, tmp_path / "moved")
    # Neither the moments of checkpoints nor software are settings of a run.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module.run_record, "versions", lambda: {"numpy": "9"})
        train(request_for(checkpoint_every=2, held_out=tmp_path / "moved"))
    check_complete(tmp_path / "run", chain)
    assert read_run(tmp_path / "run")[0].versions == {"numpy": "9"}
