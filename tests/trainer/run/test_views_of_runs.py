"""Runs whose steps are random: views by augmentation, and dropout."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from accounting.core import accountant
from tests.trainer.run.whole_runs import private_settings, same_results
from trainer.core.run.run_record import read_run
from trainer.core.step.dp_step import Step
from trainer.core.step.noise import SEEDS
from trainer.core.tf_compat import keras, tf
from trainer.keras_model import make_private
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results", "one_secret")


def network(manifest: Any = None) -> Any:
    """A model with dropout."""
    keras.utils.set_random_seed(0)
    numbers = keras.Input((13,), name="integers")
    known = keras.ops.nan_to_num(numbers) / 8
    dropped = keras.layers.Dropout(0.5)(keras.layers.Dense(4, "relu")(known))
    return keras.Model(numbers, keras.layers.Dense(1)(dropped))


def jitter(columns: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    """A view of an example."""
    numbers = columns["integers"]
    return {"integers": numbers + tf.random.stateless_normal((13,), seed)}


RANDOM = {
    "model": f"{__name__}:network",
    "views": 2,
    "augment": f"{__name__}:jitter",
    "optimizer": "sgd",
}


def test_a_run_of_random_views_and_dropout_goes_on_with_the_same_bits(
    request_for: Any, tmp_path: pathlib.Path, crash: Any
) -> None:
    settings = private_settings(**RANDOM)
    given = {"settings": settings, "held_out": None}
    summary = train(request_for("whole", **given))
    request = request_for("broken", checkpoint_every=3, **given)
    crash(request, 5)
    train(request)
    assert same_results(tmp_path / "whole", tmp_path / "broken")
    # The record and the statement say what a gradient is of; epsilon is the same.
    record, manifest = read_run(request.run)
    assert record.model["views"] == 2
    assert record.model["augment"].endswith(":jitter")
    assert "mean loss over 2 views" in summary.statement["mechanism"]
    plain = accountant.epsilon(manifest.plan, noise_multiplier=0.8, delta=1e-3)
    assert summary.statement["epsilon"] == plain.guarantee


def test_seeds_are_of_the_place_and_never_repeat(
    small_batches: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    add = Step.add

    def spy(self: Step, columns: Any, weight: Any) -> None:
        seen.append(np.asarray(columns[SEEDS]))
        add(self, columns, weight)

    monkeypatch.setattr(Step, "add", spy)
    model = make_private(
        network(), batches=small_batches.path, run=tmp_path / "run", views=2,
        augment=jitter,
        noise_multiplier=0.8, l2_norm_clip=1.0, delta=1e-3,
    )  # fmt: skip
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), ["AUC"])
    rows = np.zeros((3, 13), "f4")
    before = model.predict({"integers": rows}, verbose=0)
    model.fit(verbose=0)
    assert not np.array_equal(before, model.predict({"integers": rows}, verbose=0))
    assert len(seen) == 10  # steps of one physical batch
    words = np.concatenate(seen).reshape(-1, 4)
    assert len(np.unique(words, axis=0)) == len(words) == 10 * 16 * 2
    assert "over 2 views" in model.privacy_statement().to_text().replace("\n", " ")
    model.export()
    assert read_run(tmp_path / "run")[0].model["augment"] == "jitter"
