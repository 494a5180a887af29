"""The run loop of ``train`` and ``make_private``, and its arithmetic."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.batches.folder import stored
from tests.trainer.bounded import StandIn, plan_of
from tests.trainer.run.test_banded_runs import network
from tests.trainer.run.whole_runs import ONE_SECRET, open_session, private_model
from tests.trainer.thread_workers import outcomes
from trainer.claims.worker_group import AgreedError
from trainer.core.run import session as module
from trainer.core.run.run_record import read_run
from trainer.core.run.session import InOrder, Session, read_elements
from trainer.core.step.bounded_sum import StepSum
from trainer.core.step.noise import step_noise
from trainer.core.tf_compat import tf
from trainer.run import preflight
from trainer.settings.train_settings import TrainSettings

pytestmark = pytest.mark.usefixtures("lean_results")

SETTINGS = TrainSettings(noise_multiplier=0.8, l2_norm_clip=2.0, target_delta=1e-3)


class Failed(BaseException):
    """No handler expects it."""


class StepOfTests(StandIn):
    """A step of one variable, which keeps its arguments."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__([(3,)], clip=2.0, multiplier=0.8)
        self.drawn: list[np.ndarray] = []
        self.weights: list[list[np.ndarray]] = []
        self._fails_at = fails_at

    def begin(self, noise: list[np.ndarray], later: Any) -> None:
        self.drawn.append(noise[0])
        self.weights.append([])

    def add(self, columns: Any, weight: Any) -> None:
        self.weights[-1].append(weight)

    def finish(self, settle: Any) -> Any:
        settled = settle(lambda: None)
        if len(self.drawn) == self._fails_at:
            raise Failed
        return settled


@pytest.fixture
def parts(small_batches: Any, batch_folder: Callable[..., Any]) -> Any:
    """Ten steps of several physical batches."""
    return batch_folder(
        small_batches.steps, "parts", physical_batch_size=6, truncated_batch_size=None
    )


@pytest.fixture
def session(parts: Any, tmp_path: pathlib.Path) -> Callable[..., Session]:
    """``session(step, name="run")``: one run, by either object."""

    def make(step: Any, name: str = "run") -> Session:
        return open_session(step, parts, tmp_path / name, SETTINGS)

    return make


def _execute(session: Session, **more: Any) -> None:
    with session.steps(**more) as steps:
        for noise, batches in steps:
            session.execute(noise, batches)


@pytest.mark.usefixtures("one_secret")
def test_every_step_gets_its_batches_and_the_noise_of_its_number(
    session: Any, parts: Any
) -> None:
    step = StepOfTests()
    made = session(step)
    _execute(made)
    assert made.num_steps_executed == 10
    for number, found in enumerate(step.drawn):
        wanted = step_noise(ONE_SECRET, number, step.shapes, 0.8 * 2.0, 2.0**-30)[0]
        assert np.array_equal(found, wanted)
    for weights, rows in zip(step.weights, parts.steps, strict=True):
        assert sum(float(tf.reduce_sum(one)) for one in weights) == len(rows)
    assert max(map(len, step.weights)) > 1


def test_every_attempt_draws_noise_of_its_own(session: Any) -> None:
    """Condition C1: of a step that is taken again, too."""
    step = StepOfTests()
    made = session(step)
    for end in (1, 4, 10):
        _execute(made, end=end)
        assert made.num_steps_executed == end
    made.go_back(4)
    _execute(made)
    assert made.num_steps_executed == 10
    assert len({drawn.tobytes() for drawn in step.drawn}) == 10 + 6


def test_a_copy_of_the_process_takes_no_step(session: Any) -> None:
    """Seen to fail: both drew the noise of step 2, for weights that may differ."""
    made, refused = session(StepOfTests()), 7
    _execute(made, end=2)
    child = os.fork()
    if not child:  # the copy: only how it ends is seen
        signal.alarm(120)
        try:
            with made.steps() as steps:
                next(steps)
        except InputError as error:
            os._exit(refused if "a copy (fork)" in str(error) else 1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == refused
    _execute(made)


def test_a_run_names_the_claims_of_all_steps_that_it_executed(session: Any) -> None:
    """Seen to fail: a second ``fit`` by another step dropped those of the first."""
    made, later, unused = session(StepOfTests()), StepOfTests(), StepOfTests()
    for step, claims in ((unused, ("workers",)), (later, ("graph gradients",))):
        step.relies_on = claims
        made.use(step.of(made.manifest.plan), optimizer={}, model={})
    _execute(made, end=2)
    made.use(StepOfTests().of(made.manifest.plan), optimizer={}, model={})
    _execute(made)
    assert made.record(complete=True).relies_on == ["graph gradients"]


def test_a_step_counts_once_it_is_finished(
    session: Any, tmp_path: pathlib.Path
) -> None:
    made = session(StepOfTests(fails_at=4))
    with pytest.raises(Failed):
        _execute(made)
    assert (made.num_steps_executed, made.is_within_step) == (3, True)
    with pytest.raises(InputError, match="noise of a step may not be used"):
        _execute(made)
    # The record counts those that are committed.
    made.write_record(complete=False)
    record, _ = read_run(tmp_path / "run")
    assert (record.num_steps_executed, record.complete) == (0, False)


def test_an_error_of_one_worker_within_a_step_is_one_of_all(
    parts: Any, tmp_path: pathlib.Path
) -> None:
    """Also in what a step computes at its end; else the others might go on."""

    class Fails(StepOfTests):
        def finish(self, settle: Any) -> Any:
            return settle(self.compute)

        def compute(self) -> None:
            if len(self.drawn) == 3 and self.workers.rank == 1:
                raise ValueError("an example")

    def work(workers: Any) -> None:
        step = Fails()
        step.workers = workers
        made = open_session(step, parts, tmp_path / "run", SETTINGS, workers=workers)
        _execute(made)

    chief, other = outcomes(2, work)
    assert type(chief) is AgreedError
    assert "worker 1 on " in str(chief)
    assert "an example" not in str(chief)
    assert type(other) is SystemExit


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"bound": 4.0}, "l2_norm_clip=4.0 of the step to be that of the run, 2.0"),
        ({"bound": None}, "l2_norm_clip=None"),
        ({"noise_multiplier": 0.4}, "noise_multiplier=0.4"),
        ({"plan": plan_of(8)}, "plan="),
    ],
)
def test_a_step_of_another_clip_noise_or_plan_is_refused(
    other: dict[str, Any], message: str, session: Any
) -> None:
    step = StepOfTests()
    made = session(step)
    step.bounded.set(**other)
    with pytest.raises(InputError, match=message):
        made.use(step, optimizer={}, model={})


def test_a_sum_that_only_says_that_it_is_bounded_is_refused(session: Any) -> None:
    """Seen to fail: nothing clips it, and the run took it for its own."""
    step: Any = StepOfTests()
    made, plan = session(step), step.bounded.plan
    said, step.bounded = vars(step.bounded), StepSum(lambda columns, weight: [], plan)
    vars(step.bounded).update(said)
    with pytest.raises(InputError, match="is_bounded=False of the step"):
        made.use(step, optimizer={}, model={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batches: batches[:-1], "step 9 of the plan next; the batches end"),
        (lambda batches: [*batches, {**batches[-1], "step": 10}], "go on with step 10"),
        (lambda batches: batches[1:], "step 0 of the plan next.*with step 1"),
        (lambda batches: [batches[0], *batches], "each part of step 0 once"),
        (lambda batches: [*batches[:3], *batches], "step 3 of the plan next.*step 0"),
        (lambda batches: [*batches[:4], *batches[5:]], "step 4 of the plan next"),
    ],
)
def test_batches_that_are_not_the_plan_end_the_run(
    change: Any, message: str, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*args: Any, **more: Any) -> Iterator[Any]:
        one = [b for b in read_elements(*args, **more) if b["part"] == 0]
        return iter(change(one))

    monkeypatch.setattr(module, "read_elements", changed)
    with pytest.raises(InputError, match=message):
        _execute(session(StepOfTests()))


def test_one_of_several_workers_may_have_no_part_of_a_step() -> None:
    batches: Any = [{"step": step, "part": 0} for step in (1, 1, 3)]
    steps = InOrder(batches, is_shared=True)
    assert [len([*steps.parts(step)]) for step in range(5)] == [0, 2, 0, 1, 0]
    steps.finish()
    with pytest.raises(InputError, match=r"step 2 of the plan next.*step 1"):
        InOrder(batches, is_shared=True).parts(2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Seen: one row changed a sum by 6e9 where the bound is 0.5.
        ("XLA_FLAGS", "--xla_cpu_fast_math_honor_nans=false"),
        ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2"),
        ("TF_SET_ONEDNN_FPMATH_MODE", "BF16"),
        ("TF_OF_THE_FUTURE", ""),
    ],
)
def test_a_run_is_refused_where_a_library_is_told_anything_unknown(
    name: str, value: str, request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    request = request_for()
    with pytest.raises(InputError, match=f"`unset {name}`") as caught:
        preflight.check(request)
    assert "\n" not in str(caught.value)
    assert not value or value not in str(caught.value)
    assert not request.run.exists()


_FEWER_BITS = [f"auto_mixed_precision{x}" for x in ("", "_mkl", "_onednn_bfloat16")]


def _tell(told: bool) -> None:
    tf.config.experimental.enable_tensor_float_32_execution(told)
    tf.config.optimizer.set_jit(told)
    tf.config.run_functions_eagerly(told)  # seen to fail: a step ended in an error
    tf.config.optimizer.set_experimental_options(dict.fromkeys(_FEWER_BITS, told))


def _assert_undone() -> None:
    options = tf.config.optimizer.get_experimental_options()
    assert not any(options[name] for name in _FEWER_BITS)
    assert not options["remapping"]
    assert not tf.config.optimizer.get_jit()
    assert not tf.config.functions_run_eagerly()
    assert not tf.config.experimental.tensor_float_32_execution_enabled()


def test_a_notebook_is_told_no_other_arithmetic(
    small_batches: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: the check was one of `dpsgd train` alone."""

    def private() -> Any:
        return private_model(small_batches, tmp_path / "run", network())

    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with pytest.raises(InputError, match="`unset XLA_FLAGS`"):
        private()
    monkeypatch.delenv("XLA_FLAGS")
    model = private()
    try:
        _tell(True)
        model.fit(verbose=0)
        _assert_undone()
    finally:
        _tell(False)


# -- batches -----------------------------------------------------------------------


def _positions(folder: Any, **more: Any) -> list[tuple[int, int]]:
    source = read_elements(stored(folder.path), folder.manifest, **more)
    return [(int(batch["step"]), int(batch["part"])) for batch in source]


def test_batches_come_in_step_order_with_their_rows(small_batches: Any) -> None:
    batches = list(read_elements(stored(small_batches.path), small_batches.manifest))
    assert [int(batch["step"]) for batch in batches] == list(range(10))
    for batch, rows in zip(batches, small_batches.steps, strict=True):
        real = batch["weight"].numpy() > 0
        assert real.sum() == len(rows)
        for name in rows.dtype.names:
            found = batch["columns"][name].numpy()[real]
            np.testing.assert_array_equal(found, rows[name])


def test_other_batches_in_the_folder_since_are_refused(
    small_batches: Any, batch_folder: Any, rows: Any
) -> None:
    """Seen to fail: a run stated the epsilon of the plan that it was checked with."""
    steps = [rows(16, seed) for seed in range(10)]
    larger = {"expected_batch_size": 16, "batches_id": "1" * 32}
    folder = batch_folder(steps, "larger", **larger)
    small_batches.path.rename(folder.path.with_name("moved"))
    folder.path.rename(small_batches.path)
    for first in (0, 4):
        with pytest.raises(InputError, match="there are others now"):
            _positions(small_batches, first_step=first)


def test_other_rows_under_the_same_id_are_refused(
    small_batches: Any, batch_folder: Any, rows: Any
) -> None:
    """Seen to fail: the statement took the certificate of the former for these."""
    found = stored(small_batches.path).records_id()
    assert len(_positions(small_batches, records=found)) == 10
    folder = batch_folder([rows(8, seed) for seed in range(10)], "remade")
    small_batches.path.rename(folder.path.with_name("moved"))
    folder.path.rename(small_batches.path)
    with pytest.raises(InputError, match="there are others now"):
        _positions(small_batches, records=found)


def test_no_batch_of_a_file_comes_before_its_digest_was_checked(
    small_batches: Any,
) -> None:
    path = small_batches.path / small_batches.manifest.files[1].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    batches = read_elements(stored(small_batches.path), small_batches.manifest)
    assert [next(batches)["step"] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(InputError, match=f"{path.name}.*changed"):
        next(batches)


def test_reading_ends_when_its_reader_leaves(small_batches: Any) -> None:
    # Its own threads: one of an earlier test may end in between.
    before = set(threading.enumerate())
    iterator = read_elements(stored(small_batches.path), small_batches.manifest)
    next(iterator)
    started = set(threading.enumerate()) - before
    assert started
    iterator.close()  # type: ignore[attr-defined]
    assert not started & set(threading.enumerate())
