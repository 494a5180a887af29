"""Results are complete, refused before any work, and show no example."""

from __future__ import annotations

import itertools
import json
import logging
import pathlib
import re
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.conftest import BatchFolder, make_rows, write_batches, write_held_out
from tests.trainer.run.whole_runs import (
    LINEAR,
    private_settings,
    same_results,
    weights_of,
)
from trainer.cli.metrics_text import metrics_text
from trainer.core.run.run_record import read_run
from trainer.core.tf_compat import keras, tf
from trainer.export import check_export, export
from trainer.model.trainable_model import TrainableModel
from trainer.models import make_model
from trainer.report.progress import Terminal
from trainer.report.run_files import RUN_NAMES, exported_names
from trainer.run import privacy
from trainer.settings.train_settings import WEIGHT_AVERAGES, TrainSettings
from trainer.train import train

KERAS = "tests.trainer.test_keras_model"


def test_a_run_writes_all_results_and_a_statement_of_what_it_executed(
    request_for: Any,
) -> None:
    request = request_for()
    summary = train(request)
    run = request.run
    averages = {*map(exported_names, WEIGHT_AVERAGES)}
    unasked = {"certificate.json", "iterates", *itertools.chain(*averages)}
    assert {path.name for path in run.iterdir()} == set(RUN_NAMES) - unasked
    assert {path.name for path in (run / "private").iterdir()} == {
        "checkpoints",
        "run.id",
    }
    for path in [run / "private", *(run / "private").iterdir()]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    record, manifest = read_run(run)
    assert record.complete
    assert record.num_steps_executed == manifest.plan.num_steps == 10
    statement = privacy.run_statement(record, manifest, delta=None)
    assert statement.to_json() == json.loads((run / "privacy.json").read_text())
    assert statement.to_json() == summary.statement
    metrics = json.loads((run / "metrics.json").read_text())
    points = json.loads((run / "curve.json").read_text())["points"]
    assert [point["step"] for point in points] == list(range(11))
    assert points[-1]["auc"] == metrics["auc"]
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="finished run"):
        train(request)  # which is not replaced


def test_a_run_without_privacy_stops_where_rows_that_train_nothing_are_best(
    lean_results: None,
    one_secret: None,
    request_for: Any,
    crash: Any,
    tmp_path: pathlib.Path,
) -> None:
    """Also after a kill; the rows for the evaluation have no say."""
    fast = TrainSettings(method="non-private", learning_rate=0.2, model=LINEAR)
    whole = request_for("whole", settings=fast)
    train(whole)
    points = json.loads((whole.run / "curve.json").read_text())["points"]
    metrics = json.loads((whole.run / "metrics.json").read_text())
    assert 0 < points[-1]["step"] < 10
    assert points[-1].items() <= metrics.items()
    shown = metrics_text(metrics).splitlines()
    assert any(f"best iterate, step {metrics['step']} " in line for line in shown)
    broken = request_for("broken", settings=fast, checkpoint_every=3)
    crash(broken, 9)
    train(broken)
    assert same_results(whole.run, broken.run)
    others = write_held_out(tmp_path / "others", make_rows(50, seed=5))
    other = request_for("other", settings=fast, held_out=others)
    train(other)
    for left, right in zip(weights_of(whole.run), weights_of(other.run), strict=True):
        np.testing.assert_array_equal(left, right)


def test_nothing_is_written_where_a_request_is_refused(
    request_for: Any, tmp_path: pathlib.Path, small_batches: Any
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for changes, message in (
        ({"name": "full"}, "new or empty"),
        ({"batches": tmp_path / "full"}, r"manifest\.json"),
        ({"held_out": tmp_path / "full"}, "parquet"),
        ({"settings": private_settings(model="nothing:here")}, "nothing"),
        ({"settings": private_settings(model=f"{KERAS}:_not_saved")}, "get_config"),
        ({"settings": private_settings(keep_last=11)}, "keep_last=11"),
    ):
        with pytest.raises(InputError, match=message):
            train(request_for(**changes))
        assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_no_value_and_no_count_of_real_rows_appears_in_public(
    request_for: Any,
    batch_folder: Callable[..., Any],
    rows: Any,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    canary, count = 12345432, 1237
    steps = [rows(count), rows(3)]
    steps[0]["integers"][5] = canary
    folder = batch_folder(
        steps, "canary", truncated_batch_size=2048, physical_batch_size=2048,
        expected_batch_size=1024, num_examples=4096,
    )  # fmt: skip
    messages = []
    request = request_for(batches=folder.path)
    with Terminal() as reporter:
        train(request, reporter)
    # The same data on paths that fail.
    spoiled = (folder.path / folder.manifest.files[0].name).read_bytes()
    (folder.path / folder.manifest.files[0].name).write_bytes(spoiled[:-9] + b"x" * 9)
    with pytest.raises(InputError) as caught:
        train(request_for("spoiled", batches=folder.path))
    messages.append(str(caught.value))
    captured = capfd.readouterr()
    texts = [captured.out, captured.err, caplog.text, *messages]
    for run in (request.run, request.run.parent / "spoiled"):
        public = (p for p in run.rglob("*") if "private" not in p.parts and p.is_file())
        texts += [path.read_bytes().decode("latin-1") for path in public]
    pattern = re.compile(rf"(?<![\d.])({canary}|{count}|{count + 3}|{count / 4096})")
    assert not [text for text in texts if pattern.search(text)]


# -- exported models load where this package is not installed --------------------------


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


@pytest.mark.thorough
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
