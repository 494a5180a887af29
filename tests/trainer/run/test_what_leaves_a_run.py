"""Only weights of committed steps leave a run; lazy tables are in ``test_lazy_runs``.

Seen to fail if DP-SAT's moved weights are evaluated, or kept as an iterate, and if a
callback is called before the update of its step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from tests.trainer.run.whole_runs import LINEAR, linear, private_settings
from trainer import train as module
from trainer.averaging.averages import TrainingAverages
from trainer.averaging.iterates import Iterates
from trainer.core.run.checkpoints import Checkpoints
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import keras, raw_variable
from trainer.keras_model import make_private
from trainer.model.evaluation import Evaluator
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")


def _digest(variables: Sequence[Any]) -> str:
    found = hashlib.sha256()
    for variable in variables:
        found.update(raw_variable(variable).numpy().tobytes())
    return found.hexdigest()


class Watch:
    """The weights after each step, and those that each way out of the run has seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Step] = []
        self.committed: list[str] = []
        self.seen: dict[str, list[str]] = {}
        self._patch = monkeypatch
        made, finish = Step.__init__, Step.finish

        def make(step: Step, *arguments: Any, **more: Any) -> None:
            made(step, *arguments, **more)
            self.steps = [step]
            self.committed.append(self.now)

        def finished(step: Step, settle: Any) -> Any:
            settled = finish(step, settle)
            self.committed.append(self.now)
            return settled

        monkeypatch.setattr(Step, "__init__", make)
        monkeypatch.setattr(Step, "finish", finished)

    @property
    def now(self) -> str:
        return _digest(self.steps[0]._variables)

    def look(self, what: str) -> None:
        self.seen.setdefault(what, []).append(self.now)

    def at(self, owner: Any, name: str) -> None:
        """Looks at the weights whenever a function is called."""
        original = getattr(owner, name)

        def watched(*arguments: Any, **more: Any) -> Any:
            self.look(name)
            return original(*arguments, **more)

        self._patch.setattr(owner, name, watched)


def test_averages_iterates_checkpoints_metrics_and_exports_see_committed_weights(
    request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    outlets = (
        (TrainingAverages, "after_step"), (Iterates, "keep"), (Checkpoints, "commit"),
        (Evaluator, "metrics"), (module, "export"),
    )  # fmt: skip
    for owner, name in outlets:
        watch.at(owner, name)
    settings = private_settings(
        method="dp-sat", sat_radius=0.5, keep_last=3, keep_every=2, ema_decay=0.9,
        model=LINEAR,
    )  # fmt: skip
    train(request_for(settings=settings, checkpoint_every=3))
    assert len(set(watch.committed)) == 11  # of ten steps
    assert set(watch.seen) == {name for _, name in outlets}
    # An average is swapped in at the end, for its metrics and its export.
    during = {
        name: found[: len(watch.committed) - 1] for name, found in watch.seen.items()
    }
    during["export"] = watch.seen["export"][:1]
    for name, found in during.items():
        assert set(found) <= set(watch.committed), name


def test_callbacks_see_committed_weights(
    small_batches: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)

    class Callback(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            watch.look("begin")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            watch.look("end")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            watch.look("epoch")

    model = make_private(
        linear(), batches=small_batches.path, run=tmp_path / "run",
        noise_multiplier=0.8, l2_norm_clip=2.0, delta=1e-3,
    )  # fmt: skip
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(verbose=0, callbacks=[Callback()])
    assert watch.seen["begin"] == watch.committed[:-1]
    assert watch.seen["end"] == watch.committed[1:]
    assert set(watch.seen["epoch"]) <= set(watch.committed[1:])
