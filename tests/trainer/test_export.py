"""Exported models load where this package is not."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from trainer.export import export
from trainer.models import make_model
from trainer.tf_privacy import keras
from trainer.trainable_model import TrainableModel

COLUMNS = {
    "integers": [[float(i) for i in range(13)], [float("nan")] * 13],
    "categories": [[1] * 26, [-1, 99] + [0] * 24],
}

_LOAD = """
    import json, os, sys
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    for name in ("trainer", "pipelines", "accounting", "tensorflow_privacy"):
        sys.modules[name] = None  # an import would fail
    import numpy as np
    columns = json.loads(sys.argv[2])
    columns = {
        "integers": np.array(columns["integers"], "f4"),
        "categories": np.array(columns["categories"], "i4"),
    }
"""
_KERAS = """
    import tf_keras
    model = tf_keras.models.load_model(sys.argv[1] + "/model.keras")
    print(json.dumps(np.ravel(model.predict(columns, verbose=0)).tolist()))
"""
_TENSORFLOW = """
    import tensorflow as tf
    model = tf.saved_model.load(sys.argv[1] + "/saved_model")
    columns = {name: tf.constant(value) for name, value in columns.items()}
    found = model.signatures["serving_default"](**columns)["probability"]
    print(json.dumps(np.ravel(found).tolist()))
"""


@pytest.fixture
def model(small_batches: Any) -> TrainableModel:
    made = make_model(small_batches.manifest, embedding_dim=2, hidden=(4,))
    random = np.random.default_rng(0)
    for variable in made.variables:
        variable.assign(random.normal(0, 1, variable.shape))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("load", [_KERAS, _TENSORFLOW], ids=["keras", "tensorflow"])
def test_exported_models_load_without_this_package(
    load: str, model: TrainableModel, small_batches: Any, tmp_path: pathlib.Path
) -> None:
    export(model, small_batches.manifest, tmp_path)
    code = textwrap.dedent(_LOAD) + textwrap.dedent(load)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path), json.dumps(COLUMNS)],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env={},
        text=True,
    )
    found = json.loads(done.stdout)
    columns = {
        "integers": np.array(COLUMNS["integers"], "f4"),
        "categories": np.array(COLUMNS["categories"], "i4"),
    }
    wanted = 1 / (1 + np.exp(-np.ravel(model.outputs(columns))))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_an_export_replaces_an_unfinished_one_and_leaves_nothing_else(
    model: TrainableModel, small_batches: Any, tmp_path: pathlib.Path
) -> None:
    for _ in range(2):
        export(model, small_batches.manifest, tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {"batches", "held_out"}
    assert names == {"model.keras", "saved_model"}


def test_a_subclassed_model_is_exported_for_tensorflow(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    class Small(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, values: Any) -> Any:
            return self.dense(values)

    integers = keras.Input((13,), name="integers")
    network = keras.Model(integers, Small()(integers))
    export(
        TrainableModel(network=network, description={}),
        small_batches.manifest,
        tmp_path,
    )
    assert (tmp_path / "saved_model" / "saved_model.pb").exists()
