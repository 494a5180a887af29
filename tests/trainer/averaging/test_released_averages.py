"""The averages that a run exports are averages of the iterates that it released."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.trainer.flat_settings import train_settings
from trainer import models
from trainer.core.tf_compat import keras
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
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
    """Seen to fail for averages before the noise, of the step before, or of one more.

    And without the warm-up of the moving one.
    """
    assert not differing(**changes)
