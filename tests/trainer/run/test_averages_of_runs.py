"""Averages of a run are those of its iterates, and do not affect training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.trainer.run.whole_runs import (
    AVERAGES,
    LINEAR,
    load_model,
    private_settings,
)
from trainer.model.evaluation import HeldOut
from trainer.report.run_files import RUN_NAMES, exported_names
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results", "one_secret")


def test_every_average_has_metrics_and_the_asked_ones_a_model(
    request_for: Any, small_batches: Any
) -> None:
    request = request_for(settings=private_settings(**AVERAGES))
    run, metrics = request.run, train(request).metrics
    found = metrics["aggregates"]
    assert list(found) == ["ema", "uta", "past_ema", "upa", "opa", "omv"]
    losses = [values["log_loss"] for values in (metrics, *found.values())]
    assert len(set(losses)) == 7
    assert {path.name for path in run.iterdir()} == set(RUN_NAMES) - {
        "certificate.json",
        "curve.png",
        *exported_names("past_ema"),
        *exported_names("custom"),
        *exported_names("past_custom"),
    }
    # By other means: plain NumPy and the exported models.
    kept = [np.load(run / f"iterates/step-{step:08d}.npz") for step in (6, 8, 10)]
    last, upa = (load_model(run / name) for name in ("model.keras", "upa_model.keras"))
    for index, weight in enumerate(upa.trainable_weights):
        mean = sum(file[f"weight_{index}"].astype("f8") for file in kept) / 3
        np.testing.assert_allclose(weight, mean, rtol=1e-6, atol=1e-9)
    columns = next(HeldOut(request.held_out, small_batches.manifest).batches())
    predictions = []
    for file in kept:
        last.set_weights([file[name] for name in file])
        inputs = {name: columns[name] for name in last.input}
        predictions.append(last(inputs).numpy().ravel())
    table = pq.read_table(run / "uncertainty.parquet")
    np.testing.assert_allclose(table["prediction"], np.mean(predictions, 0), rtol=1e-5)
    stddev = np.std(predictions, 0, ddof=1)
    np.testing.assert_allclose(table["stddev"], stddev, rtol=1e-3, atol=1e-7)
    label, opa = columns["label"], np.mean(predictions, 0)
    loss = -np.log(np.where(label, opa, 1 - opa)).mean()
    assert found["opa"]["log_loss"] == pytest.approx(loss, rel=1e-5)


def test_training_depends_on_an_average_only_from_the_step_that_starts_at_it(
    request_for: Any,
) -> None:
    none = {"keep_last": 3, "keep_every": 2, "noise_multiplier": 0.0, "model": LINEAR}
    over = {**AVERAGES, **none, "uncertainty": None}
    over |= {"train_over": "uta", "aggregate_from": 8}
    requests = [
        request_for(name, settings=private_settings(**settings), held_out=None)
        for name, settings in (("none", none), ("over", over))
    ]
    for request in requests:
        train(request)
    for step, same in ((6, True), (8, True), (10, False)):
        left, right = (
            np.load(request.run / f"iterates/step-{step:08d}.npz")["weight_0"]
            for request in requests
        )
        assert np.array_equal(left, right) == same
