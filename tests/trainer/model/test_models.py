"""The default model of any prepared table, and refusals of others."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.core.batches.batch_format import Column
from pipelines.tables.schema import Schema
from trainer.core.tf_compat import keras, tf
from trainer.model.losses import loss_of_ones_own
from trainer.model.table_model import read_table, table_model
from trainer.models import TrainableModel, check_model, make_loss, make_model
from trainer.run.preflight import with_loss
from trainer.settings.train_settings import AUTO_LOSS, TrainSettings

COLUMNS: dict[str, Any] = {
    "raw": {"kind": "numeric"},
    "scaled": {"kind": "numeric", "range": [0, 1]},
    "told": {"kind": "numeric", "range": [0, 1], "missing": "indicator"},
    "vector": {"kind": "numeric", "length": 2},
    "job": {"kind": "category", "buckets": 5},
    "words": {"kind": "text", "tokens": 3, "buckets": 4},
    "city": {"kind": "category", "vocabulary": ["a"]},
    "features": {"kind": "boolean"},  # as a layer is named
    "y": {"kind": "label", "task": "binary"},
}


def manifest_of(manifest: Any, columns: dict[str, Any], **label: Any) -> Any:
    """Returns a manifest of the data that a schema prepares."""
    y = {**columns["y"], **label}
    schema = Schema.from_json({"version": 1, "columns": {**columns, "y": y}})
    return dataclasses.replace(
        manifest,
        dataset=schema.description,
        columns=tuple(
            Column(name=out.name, dtype=out.dtype, shape=out.shape)
            for out in schema.outputs
        ),
    )


@pytest.fixture
def manifest(small_batches: Any) -> Any:
    return small_batches.manifest


def row(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "raw": 0.0, "scaled": 0.0, "told": 0.0, "told_missing": 0, "vector": [0.0, 0.0],
        "job": 0, "words": [0, 0, 0], "city": 0, "features": 0.0, **changes,
    }  # fmt: skip
    whole = ("told_missing", "job", "words", "city")
    return {
        name: tf.constant([value], tf.int32 if name in whole else tf.float32)
        for name, value in values.items()
    }


def features_of(network: Any, **changes: Any) -> np.ndarray:
    """Returns the inputs of the fully connected layers for a row."""
    inner = keras.Model(network.input, network.get_layer("features_").output)
    columns = row(**changes)
    columns["told_missing"] = tf.cast(columns["told_missing"], tf.int8)
    found: np.ndarray = inner(columns).numpy()[0]
    return found


def test_columns_enter_as_the_schema_says(manifest: Any) -> None:
    table = read_table(manifest_of(manifest, COLUMNS))
    network = table_model(table, embedding_dim=2, hidden=(4,))
    e, nan = np.e, np.nan
    start = features_of(network, raw=e - 1, scaled=-0.5, told=0.5, told_missing=1)
    # raw and missing, scaled and missing, told, told_missing, vector, features and
    # missing; then embeddings.
    np.testing.assert_allclose(
        start[:10], [0.25, 0, -0.5, 0, 0.5, 1, 0, 0, 0, 0], atol=1e-6
    )
    found = features_of(network, raw=nan, scaled=nan, features=nan, vector=[3.0, -4.0])
    np.testing.assert_allclose(
        found[:10], [0, 1, 0, 1, 0, 0, 3, -4, 0, 1], atol=1e-6
    )  # fmt: skip


def test_ids_have_rows_of_their_own_and_lists_the_mean_of_theirs(manifest: Any) -> None:
    table = read_table(manifest_of(manifest, COLUMNS))
    network = table_model(table, embedding_dim=2, hidden=())
    rows = network.get_layer("embeddings").embeddings.numpy()
    assert rows.shape == (5 + 4 + 3, 2)
    found = features_of(network, job=4, words=[3, 1, 0], city=2)[10:]
    np.testing.assert_allclose(found[:2], rows[4])
    np.testing.assert_allclose(found[2:4], (rows[5 + 3] + rows[5 + 1]) / 2)
    np.testing.assert_allclose(found[4:], rows[9 + 2])
    np.testing.assert_array_equal(features_of(network)[12:14], [0, 0])


def test_any_column_value_gives_a_finite_output(manifest: Any) -> None:
    table = read_table(manifest_of(manifest, COLUMNS))
    network = table_model(table, embedding_dim=2, hidden=(4,))
    for number in (np.nan, np.inf, -np.inf, 3.4e38):
        for whole in (-(2**31), 2**31 - 1):
            found = features_of(
                network, raw=number, scaled=number, vector=[number] * 2,
                job=whole, words=[whole] * 3, city=whole,
            )  # fmt: skip
            assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("label", "loss", "units"),
    [
        ({"task": "binary"}, "binary_crossentropy", 1),
        ({"task": "classes", "classes": 3}, "sparse_categorical_crossentropy", 3),
        ({"task": "regression", "range": [0, 1]}, "mean_squared_error", 1),
    ],
)
def test_the_output_is_for_the_label_and_other_losses_are_refused(
    manifest: Any, label: dict[str, Any], loss: str, units: int
) -> None:
    columns = {"job": COLUMNS["job"], "y": COLUMNS["y"]}
    found = manifest_of(manifest, columns, **label)
    sizes: dict[str, Any] = {"embedding_dim": 2, "hidden": (3,)}
    model = make_model(found, loss=make_loss(loss), **sizes)
    assert model.network.output_shape == (None, units)
    assert model.description["name"] == "table"
    auto = TrainSettings(loss=AUTO_LOSS, noise_multiplier=1.0, l2_norm_clip=1.0)
    assert with_loss(auto, found.dataset).loss == loss
    given = dataclasses.replace(auto, loss="huber")
    assert with_loss(given, found.dataset) is given
    assert with_loss(auto, {"label": "of one's own"}).loss == "binary_crossentropy"
    wrong = "mean_squared_error" if label["task"] == "binary" else "binary_crossentropy"
    with pytest.raises(
        InputError, match=f"--loss {loss} for the {label['task']} label"
    ):
        make_model(found, loss=make_loss(wrong), **sizes)


# -- refusals of models that would break privacy ---------------------------------------


def _click_model(manifest: Any, **sizes: Any) -> TrainableModel:
    return make_model(manifest, **{"embedding_dim": 3, "hidden": (5, 4), **sizes})


def _branching(labels: Any, outputs: Any) -> Any:
    del labels
    return outputs[:, 0] if tf.reduce_sum(outputs) > 0 else -outputs[:, 0]


def test_a_python_branch_on_a_tensor_is_refused_with_its_line(manifest: Any) -> None:
    network = _with(lambda: keras.layers.Dense(1))
    loss = loss_of_ones_own("m:f", _branching)
    own = TrainableModel(network=network, description={}, loss=loss)
    with pytest.raises(InputError, match=r"test_models\.py, line \d+.*cond") as error:
        check_model(own, manifest)
    assert "\n" not in str(error.value)


def test_data_of_another_kind_is_refused(manifest: Any) -> None:
    other = dataclasses.replace(manifest, dataset={})
    with pytest.raises(InputError, match="--model"):
        _click_model(other)
    short = dataclasses.replace(manifest, columns=manifest.columns[:2])
    with pytest.raises(InputError, match="categories"):
        _click_model(short)


def _with(layer: Callable[[], Any]) -> Any:
    integers = keras.Input((13,), name="integers")
    values = keras.ops.nan_to_num(integers)
    values = layer()(keras.layers.Dense(4)(values))
    return keras.Model(integers, keras.layers.Dense(1)(values))


class _BatchMean(keras.layers.Layer):
    def call(self, values: Any) -> Any:
        return values - tf.reduce_mean(values, 0, keepdims=True)


def test_a_last_layer_of_zeros_hides_no_mixing(manifest: Any) -> None:
    network = _with(_BatchMean)
    for variable in network.layers[-1].trainable_variables:
        variable.assign(tf.zeros_like(variable))
    before = [variable.numpy() for variable in network.trainable_variables]
    with pytest.raises(InputError, match="not to depend on the others"):
        check_model(TrainableModel(network=network, description={}), manifest)
    for variable, value in zip(network.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_wrong_inputs_and_outputs_are_refused(manifest: Any) -> None:
    other = keras.Input((13,), name="numbers")
    wide = keras.Input((13,), name="integers")
    label = keras.Input((), name="label")
    for network, message in (
        (keras.Model(other, keras.layers.Dense(1)(other)), "'numbers'"),
        (keras.Model(label, keras.layers.Dense(1)(label[:, None])), "'label'"),
        (keras.Model(wide, keras.layers.Dense(2)(wide)), "one logit per example"),
        (keras.Model(wide, keras.ops.sum(wide, 1)), "trainable"),
    ):
        with pytest.raises(InputError, match=message):
            check_model(TrainableModel(network=network, description={}), manifest)


def test_a_model_of_ones_own(
    manifest: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text(
        "import keras\n"
        "def small(manifest):\n"
        "    categories = keras.Input((26,), dtype='int32', name='categories')\n"
        "    values = keras.layers.Embedding(7, 2)(categories)\n"
        "    values = keras.layers.Flatten()(values)\n"
        "    return keras.Model(categories, keras.layers.Dense(1)(values))\n"
        "def number(manifest):\n"
        "    return 3\n"
        "def alone():\n"
        "    return small(None)\n"
        "made = alone()\n"
    )
    monkeypatch.chdir(tmp_path)
    alone = _click_model(manifest, model="my_models:alone")
    model = _click_model(manifest, model="my_models:small")
    assert alone.description == {**model.description, "name": "my_models:alone"}
    assert model.description == {
        "name": "my_models:small",
        "loss": "binary_crossentropy",
        "num_parameters": 67,
    }
    for spec, message in (
        ("my_models:other", "function"),
        ("no_such_module:small", "no_such_module"),
        ("my_models", "module:function"),
        ("my_models:number", "keras.Model"),
        ("my_models:made", "it names a model"),
    ):
        with pytest.raises(InputError, match=message):
            _click_model(manifest, model=spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def make(manifest):\n    return 1 / 0\n", r"ZeroDivisionError: .*line 2\)"),
        ("import os\n1 + 'a'\n", r"TypeError: .*raises\d.py, line 2\)"),
        ("def make(manifest)\n", r"SyntaxError: .*raises\d.py, line 1\)"),
    ],
)
def test_an_error_of_a_users_model_is_one_line_with_its_place(
    text: str,
    message: str,
    small_batches: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"raises{len(text) % 10}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=f"model='{name}:make'.*{message}") as caught:
        make_model(
            small_batches.manifest, model=f"{name}:make", embedding_dim=1, hidden=()
        )
    assert "\n" not in str(caught.value)
