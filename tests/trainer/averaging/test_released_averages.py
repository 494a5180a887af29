"""The averages that a run exports are averages of the iterates that it released."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.trainer.flat_settings import train_settings
from trainer import models
from trainer.averaging import averages
from trainer.averaging.averages import MovingAverage, TailAverage, TrainingAverages
from trainer.core.step.dp_step import Step
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import keras
from trainer.train import train

NUM_STEPS, DECAY, TAIL, RATE = 10, 0.7, 4, 0.5
SETTINGS: dict[str, Any] = {
    "noise_multiplier": 0.8,
    "l2_norm_clip": 1.0,
    "optimizer": "sgd",
    "learning_rate": RATE,
    "embedding_dim": 2,
    "hidden": (4,),
    "ema_decay": DECAY,
    "tail": TAIL,
    "keep_last": NUM_STEPS,
    "keep_every": 1,
}

Weights = list[np.ndarray]
RunAndCheck = Callable[..., None]


def _initial(manifest: Any) -> Weights:
    keras.backend.clear_session()
    keras.utils.set_random_seed(TrainSettings.init_seed)
    sizes = {name: SETTINGS[name] for name in ("embedding_dim", "hidden")}
    made = models.make_model(manifest, **sizes)
    return [variable.numpy() for variable in made.variables]


def _kept(run: pathlib.Path) -> list[Weights]:
    """The iterates after steps 1, 2, ..., in NumPy."""
    paths = sorted((run / "iterates").glob("step-*.npz"))
    assert len(paths) == NUM_STEPS
    files = map(np.load, paths)
    return [[file[f"weight_{i}"] for i in range(len(file.files))] for file in files]


def _ema(iterates: list[Weights]) -> Weights:
    """By the formula in ``averages``; ``iterates[0]`` are the initial weights."""
    average = [weight.astype("f8") for weight in iterates[0]]
    for step, iterate in enumerate(iterates[1:], 1):
        decay = min(DECAY, (1 + step) / (10 + step))
        average = [
            decay * a + (1 - decay) * w for a, w in zip(average, iterate, strict=True)
        ]
    return average


def _uta(iterates: list[Weights]) -> Weights:
    tail = iterates[-TAIL:]
    return [np.mean(weights, 0, dtype="f8") for weights in zip(*tail, strict=True)]


def _released(run: pathlib.Path, name: str) -> Weights:
    model = keras.models.load_model(run / name)
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.fixture
def run_and_check(
    small_batches: Any, held_out: pathlib.Path, tmp_path: pathlib.Path
) -> RunAndCheck:
    """``run_and_check(**changes)`` compares a run's averages with its iterates."""

    def run(**changes: Any) -> None:
        folder = tmp_path / "run"
        settings = train_settings(**{**SETTINGS, **changes})
        train(
            Request(
                settings=settings, batches=small_batches.path, held_out=held_out,
                run=folder,
            )
        )  # fmt: skip
        iterates = [_initial(small_batches.manifest), *_kept(folder)]
        for name, wanted in (
            ("model.keras", iterates[-1]),
            ("ema_model.keras", _ema(iterates)),
            ("uta_model.keras", _uta(iterates)),
        ):
            found = _released(folder, name)
            for left, right in zip(found, wanted, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)

    return run


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adam", "learning_rate": 0.05},
        {"train_over": "uta", "aggregate_from": 3},
        {"method": "dp-sat", "sat_radius": 0.5},
        {"method": "model-mix", "mix_width": 0.5, "linf_factor": 4},
    ],
    ids=["sgd", "adam", "train-over", "dp-sat", "model-mix"],
)
def test_exported_averages_are_those_of_the_kept_iterates(
    changes: dict[str, Any], run_and_check: RunAndCheck
) -> None:
    run_and_check(**changes)


# -- the faults that the test above is to see ------------------------------------------


def _before_noise(patch: pytest.MonkeyPatch, average: type) -> None:
    """The average uses weights without the noise of their last step."""
    drawn: list[Weights] = []
    begin, update = Step.begin, average.update  # type: ignore[attr-defined]

    def keep(self: Step, noise: Any, later: Any = None) -> None:
        drawn.append(noise)
        begin(self, noise, later)

    def update_without(self: Any, num_updates: int) -> None:
        share = RATE / 8  # expected_batch_size
        clean = [
            weight.numpy() + share * noise
            for weight, noise in zip(self._weights, drawn[-1], strict=True)
        ]
        with averages.weights_of(self._weights, clean):
            update(self, num_updates)

    patch.setattr(Step, "begin", keep)
    patch.setattr(average, "update", update_without)


def _late(patch: pytest.MonkeyPatch) -> None:
    """The averages use the iterate of the step before."""
    before, after = TrainingAverages.before_step, TrainingAverages.after_step

    def update_before(self: Any, step: int) -> None:
        if step:
            after(self, step)
        before(self, step)

    patch.setattr(TrainingAverages, "before_step", update_before)
    patch.setattr(TrainingAverages, "after_step", lambda *_: None)


def _shift(patch: pytest.MonkeyPatch, average: type) -> None:
    """The average counts one step too many, with another warm-up and another slot."""
    update = average.update  # type: ignore[attr-defined]
    patch.setattr(average, "update", lambda self, step: update(self, step + 1))


def _longer_tail(patch: pytest.MonkeyPatch) -> None:
    init = TailAverage.__init__
    patch.setattr(
        TailAverage, "__init__",
        lambda self, weights, tail: init(self, weights, tail + 1),
    )  # fmt: skip


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "ema-before-noise": lambda patch: _before_noise(patch, MovingAverage),
    "uta-before-noise": lambda patch: _before_noise(patch, TailAverage),
    "late": _late,
    "ema-counts-one-more": lambda patch: _shift(patch, MovingAverage),
    "no-warm-up": lambda patch: patch.setattr(
        averages, "newest_weight", lambda _, decay: 1 - decay
    ),
    "longer-tail": _longer_tail,
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_an_average_of_other_weights_is_seen(
    fault: str, run_and_check: RunAndCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_and_check()
