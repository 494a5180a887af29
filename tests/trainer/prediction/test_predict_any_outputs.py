"""Means and intervals of a model of several outputs, end to end."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.trainer.conftest import make_rows, write_batches, write_held_out
from trainer.prediction.predict import predict
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

_CODE = """
import tensorflow as tf
import keras

def several(manifest):
    x = keras.Input((13,), name="integers")
    clean = keras.ops.nan_to_num(x)
    outputs = {
        "label": keras.layers.Dense(1)(clean),
        "categories": keras.layers.Dense(26)(clean),
    }
    return keras.Model({"integers": x}, outputs)

def both(labels, outputs):
    label = tf.cast(labels["label"], tf.float32) - outputs["label"][:, 0]
    others = tf.cast(labels["categories"], tf.float32) - outputs["categories"]
    return label**2 + tf.reduce_mean(others**2, 1)
"""


def test_a_table_gets_what_the_held_out_examples_got(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs_in_predictions.py").write_text(_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    batches = write_batches(tmp_path / "batches", [make_rows(8, s) for s in range(4)])
    table = write_held_out(tmp_path / "table", make_rows(30, seed=9))
    settings = TrainSettings(
        model="outputs_in_predictions:several", loss="outputs_in_predictions:both",
        keep_last=3, keep_every=1, uncertainty=0.9, noise_multiplier=1.0,
        l2_norm_clip=1.0, eval_every=4,
    )  # fmt: skip
    run = tmp_path / "run"
    request = Request(settings=settings, batches=batches.path, held_out=table, run=run)
    train(request)
    predict(run, table, tmp_path / "opa", uncertainty=0.9)
    found, of_run = (
        pq.read_table(p) for p in (tmp_path / "opa", run / "uncertainty.parquet")
    )
    assert set(found.column_names) == set(of_run.column_names)
    assert len(found.column_names) == 8
    for name in found.column_names:
        np.testing.assert_allclose(_array(found, name), _array(of_run, name), rtol=1e-5)


def _array(table: Any, name: str) -> np.ndarray:
    return np.array(table[name].to_pylist())
