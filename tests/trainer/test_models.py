"""The click model, and refusals of models that would break privacy."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from trainer.core.tf_compat import keras, tf
from trainer.model.losses import loss_of_ones_own
from trainer.models import TrainableModel, check_model, make_model


@pytest.fixture
def manifest(small_batches: Any) -> Any:
    return small_batches.manifest


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
