"""Exported models load where this package is not installed."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from tests.trainer.conftest import BatchFolder, make_rows, write_batches
from trainer.core.tf_compat import keras, tf
from trainer.export import check_export, export
from trainer.model.trainable_model import TrainableModel
from trainer.models import make_model

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
    found = {}
    folder = sys.argv[1]

    import tensorflow as tf
    model = tf.saved_model.load(folder + "/saved_model")
    tensors = {name: tf.constant(value) for name, value in columns.items()}
    signature = model.signatures["serving_default"]
    found["tensorflow"] = signature(**tensors)["probability"]
    logits = model.signatures["outputs"](**tensors)["outputs"]
    found["logits"] = tf.sigmoid(logits)

    import keras
    model = keras.models.load_model(folder + "/model.keras")
    found["keras"] = model.predict(columns, verbose=0)
    layer = keras.layers.TFSMLayer(folder + "/saved_model")
    found["a layer of keras"] = layer(columns)["probability"]
    print(json.dumps({k: np.ravel(v).tolist() for k, v in found.items()}))
"""


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> BatchFolder:
    return write_batches(tmp_path_factory.mktemp("made") / "batches", [make_rows(8)])


@pytest.fixture(scope="module")
def model(batches: BatchFolder) -> TrainableModel:
    made = make_model(batches.manifest, embedding_dim=2, hidden=(4,))
    random = np.random.default_rng(0)
    for variable in made.variables:
        variable.assign(random.normal(0, 1, variable.shape))
    return made


@pytest.fixture(scope="module")
def exported(
    model: TrainableModel,
    batches: BatchFolder,
    tmp_path_factory: pytest.TempPathFactory,
) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("exported")
    export(model, batches.manifest, folder)
    return folder


@pytest.mark.slow
def test_exported_models_load_without_this_package(
    model: TrainableModel, exported: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(_LOAD), str(exported),
         json.dumps(COLUMNS)],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env={},
        text=True,
    )  # fmt: skip
    columns = {
        "integers": np.array(COLUMNS["integers"], "f4"),
        "categories": np.array(COLUMNS["categories"], "i4"),
    }
    wanted = 1 / (1 + np.exp(-np.ravel(model.outputs(columns))))
    found = json.loads(done.stdout)
    assert len(found) == 4
    for name, values in found.items():
        np.testing.assert_allclose(values, wanted, rtol=1e-5, err_msg=name)


def test_a_layer_with_a_table_is_exported_with_the_table(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    keras.utils.set_random_seed(0)
    ids = keras.Input((26,), dtype="int32", name="categories")
    places = keras.layers.IntegerLookup(vocabulary=[5, 3, 1])(ids)
    network = keras.Model(ids, keras.layers.Dense(1)(keras.ops.cast(places, "float32")))
    model = TrainableModel(network=network, description={})
    check_export(model, small_batches.manifest)
    export(model, small_batches.manifest, tmp_path)
    columns = {"categories": tf.constant([[0] * 13 + [3] * 13, [1] * 26])}
    wanted = tf.sigmoid(network(columns))
    loaded = tf.saved_model.load(str(tmp_path / "saved_model"))
    found = loaded.signatures["serving_default"](**columns)["probability"]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(columns), wanted, rtol=1e-6)
