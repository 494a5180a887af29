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
def differing(
    small_batches: Any, tmp_path: pathlib.Path, lean_results: None
) -> Callable[..., set[str]]:
    """``differing(**changes)``: weights of a run that its iterates contradict."""

    def find(**changes: Any) -> set[str]:
        folder = tmp_path / "run"
        settings = train_settings(**{**SETTINGS, **changes})
        train(
            Request(
                settings=settings, batches=small_batches.path, held_out=None,
                run=folder,
            )
        )  # fmt: skip
        iterates = [_initial(small_batches.manifest), *_kept(folder)]
        wanted = {"": iterates[-1], "ema_": _ema(iterates), "uta_": _uta(iterates)}
        return {
            name
            for name, weights in wanted.items()
            if not all(
                np.allclose(left, right, rtol=1e-5, atol=1e-6)
                for left, right in zip(
                    _released(folder, f"{name}model.keras"), weights, strict=True
                )
            )
        }

    return find


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_over": "uta", "aggregate_from": 3},
        {"method": "dp-sat", "sat_radius": 0.5},
        {"method": "model-mix", "mix_width": 0.5, "linf_factor": 4},
    ],
    ids=["sgd", "train-over", "dp-sat", "model-mix"],
)
def test_exported_averages_are_those_of_the_kept_iterates(
    changes: dict[str, Any], differing: Callable[..., set[str]]
) -> None:
    assert not differing(**changes)


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


def _no_warm_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(averages, "newest_weight", lambda _, decay: 1 - decay)


#: Faults of one run, and the averages in which they show: each in another one.
FAULTS: dict[str, tuple[list[Callable[[pytest.MonkeyPatch], Any]], set[str]]] = {
    "before noise": (
        [
            lambda patch: _before_noise(patch, MovingAverage),
            lambda patch: _before_noise(patch, TailAverage),
        ],
        {"ema_", "uta_"},
    ),
    "counts": (
        [lambda patch: _shift(patch, MovingAverage), _longer_tail],
        {"ema_", "uta_"},
    ),
    "late": ([_late], {"ema_", "uta_"}),
    "no warm-up": ([_no_warm_up], {"ema_"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_an_average_of_other_weights_is_seen(
    name: str, differing: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, averaged = FAULTS[name]
    for plant in faults:
        plant(monkeypatch)
    assert differing() == averaged
