"""Runs that start at weights which the user declares public."""

from __future__ import annotations

import copy
import hashlib
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.conftest import make_rows
from tests.trainer.run.whole_runs import (
    linear,
    load_model,
    private_model,
    private_settings,
)
from trainer.core.run.run_record import read_run
from trainer.core.tf_compat import keras
from trainer.model.metrics import binary_metrics
from trainer.run import preflight
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

KERNEL = np.linspace(-1, 1, 13, dtype="f4").reshape(13, 1)
BIAS = np.array([0.25], "f4")


@pytest.fixture(autouse=True)
def weights(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "w.npz", KERNEL, BIAS)


def _settings(path: str, **changes: Any) -> TrainSettings:
    fields = {
        "model": f"{linear.__module__}:linear",
        "initial_weights": path,
        "initial_weights_are_public": True,
        # No step moves a weight.
        "learning_rate": 1e-30,
    }
    return private_settings(**{**fields, **changes})


def _save_keras(path: pathlib.Path) -> None:
    x = keras.Input((13,), name="any")
    model = keras.Model(x, keras.layers.Dense(1)(x))
    model.set_weights([KERNEL, BIAS])
    model.save(path, save_format="keras")


@pytest.mark.parametrize("name", ["w.npz", "w.keras"])
def test_a_run_and_its_moving_average_start_at_the_weights_of_the_file(
    name: str, request_for: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / name
    if name == "w.keras":
        _save_keras(path)
    request = request_for(settings=_settings(str(path), ema_decay=0.9))
    summary = train(request)
    rows = make_rows(300, seed=99)
    logits = np.nan_to_num(rows["integers"]) / 8 @ KERNEL[:, 0] + BIAS
    curve = json.loads((request.run / "curve.json").read_text())["points"]
    expected = binary_metrics(rows["label"], logits)
    assert curve[0]["log_loss"] == pytest.approx(expected["log_loss"], rel=1e-6)
    for exported in ("model.keras", "ema_model.keras"):
        found = load_model(request.run / exported).get_weights()
        np.testing.assert_allclose(found[0], KERNEL, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found[1], BIAS, rtol=1e-6, atol=1e-9)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    record, _ = read_run(request.run)
    assert record.model["initial_weights"] == {
        "sha256": digest,
        "declared_public": True,
    }
    sentence = "the run started from weights that the user declares public"
    text = " ".join((request.run / "privacy.txt").read_text().split())
    assert sentence in text
    assert digest in text
    assert summary.statement["epsilon"] > 0


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([KERNEL], "it has 1 of 2"),
        ([KERNEL[:, 0], BIAS], r"kernel.* has shape \(13, 1\), that of the file \(13,"),
        ([KERNEL * np.nan, BIAS], "no array of finite numbers"),
        ([np.full((13, 1), None), BIAS], "Object arrays cannot be loaded"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_any_step(
    arrays: list[Any], message: str, request_for: Any, tmp_path: pathlib.Path
) -> None:
    np.savez(tmp_path / "w.npz", *arrays)
    request = request_for(settings=_settings(str(tmp_path / "w.npz")))
    with pytest.raises(InputError, match=message) as error:
        train(request)
    assert "\n" not in str(error.value)
    assert not request.run.exists()


@pytest.mark.parametrize("below", ["w.npz", "iterates/w.npz"])
def test_weights_of_a_run_on_the_same_batches_are_refused(
    below: str, request_for: Any, small_batches: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "earlier" / below
    path.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "w.npz", path)
    manifest = tmp_path / "earlier" / "manifest.json"
    shutil.copy(small_batches.path / "manifest.json", manifest)
    request = request_for(settings=_settings(str(path)))
    with pytest.raises(InputError, match="they are of a run on these very batches"):
        preflight.check(request)
    other = manifest.read_text().replace("0" * 32, "1" * 32)
    manifest.write_text(other)
    preflight.check(request)


def test_a_network_that_a_run_has_trained_begins_no_other_on_the_same_rows(
    small_batches: Any, batch_folder: Any, rows: Any, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: both were accepted, each with the epsilon of one run."""
    inputs = keras.Input((13,), name="integers")
    body = keras.layers.Dense(2)(keras.ops.nan_to_num(inputs))
    network = keras.Model(inputs, keras.layers.Dense(1)(body))
    steps = [rows(8, seed=step) for step in range(2)]
    other = batch_folder(steps, "others", batches_id="1" * 32)

    def fit(name: str, network: Any, batches: Any = small_batches, **more: Any) -> Any:
        private = private_model(batches, tmp_path / name, network, **more)
        private.fit(epochs=1, steps_per_epoch=2, verbose=0)
        return private

    fit("first", network)

    def shifted(columns: Any, seed: Any) -> Any:
        del seed
        return {"integers": columns["integers"] + network(columns["integers"][None])[0]}

    anew, head = keras.models.clone_model(network), keras.layers.Dense(1)(body)
    reads: dict[str, Any] = {"augment": shifted}
    for again, more in (
        (network, {}), (keras.Model(inputs, head), {}), (anew, reads)
    ):  # fmt: skip
        with pytest.raises(InputError, match="no other run has trained"):
            fit("second", again, **more)
    assert not (tmp_path / "second").exists()
    fit("of_other_rows", network, other)
    private = fit("anew", anew)
    network.save(tmp_path / "trained.keras")
    copied = keras.models.clone_model(anew)
    copied.layers[-1].set_weights(network.layers[-1].get_weights())
    loaded = keras.models.load_model(tmp_path / "trained.keras")
    for again in (copy.deepcopy(network), loaded, copied):
        with pytest.raises(InputError, match="no other run has trained"):
            fit("of_copied_weights", again)
    private.fit(epochs=1, steps_per_epoch=1, verbose=0)
    anew.set_weights(network.get_weights())
    with pytest.raises(InputError, match="no other run has trained"):
        private.fit(epochs=1, verbose=0)
