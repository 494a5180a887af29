"""The files of a model tell nothing of what its process computed beside it."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf import text_format

from accounting.core.validation import InputError
from tests.trainer.conftest import make_rows, write_batches
from trainer.export import export, own_numbers
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import keras, pywrap_tfe, saved_model_pb2, tf
from trainer.train import train


def _branch(values: Any) -> Any:
    return tf.cond(tf.reduce_sum(values) > 0, lambda: values, lambda: -values)


def _loop(values: Any) -> Any:
    return tf.while_loop(
        lambda one: tf.reduce_sum(one) < 9, lambda v: (v + 1,), (values,)
    )


@tf.custom_gradient
def _with_a_gradient(values: Any) -> Any:
    return values * 2, lambda upstream: upstream


LAYERS: dict[str, Callable[[], Any]] = {
    "a kernel": lambda: keras.layers.Dense(1),
    "a branch": lambda: keras.layers.Lambda(_branch, output_shape=(4,)),
    "a loop": lambda: keras.layers.Lambda(lambda v: _loop(v)[0], output_shape=(4,)),
    "a recurrent layer": lambda: keras.Sequential(
        [keras.layers.Reshape((2, 2)), keras.layers.LSTM(2)]
    ),
    "a gradient of its own": lambda: keras.layers.Lambda(
        _with_a_gradient, output_shape=(4,)
    ),
    "a table": lambda: keras.layers.IntegerLookup(vocabulary=[3, 5]),
    "a constant": lambda: keras.layers.Lambda(
        lambda values: values + tf.constant([[1.0] * 4]), output_shape=(4,)
    ),
    "a large constant": lambda: keras.layers.Normalization(
        mean=[1.0] * 4, variance=[4.0] * 4
    ),
}  # fmt: skip


#: Exports begin at other numbers, of as many digits: TensorFlow registers names once.
_STARTS = itertools.count(own_numbers._FIRST, 10**12)


@contextlib.contextmanager
def _as_the_first(start: int) -> Iterator[None]:
    """The next exports have the numbers of the first of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_numbers, "_NUMBERS", itertools.count(start))
        yield


def _names(folder: pathlib.Path, start: int) -> list[str]:
    """All texts in a SavedModel, as if its numbers began at 0; their order is free."""
    found = saved_model_pb2.SavedModel()
    found.ParseFromString((folder / "saved_model.pb").read_bytes())
    text = text_format.MessageToString(found, as_utf8=True)
    texts = set(re.findall(r': "([^"\\\n]+)"\n', text))
    return sorted(
        re.sub(r"\d{16,}", lambda one: str(int(one[0]) - start), text) for text in texts
    )


def _exported(network: Any, folder: pathlib.Path) -> list[str]:
    start = next(_STARTS)
    with _as_the_first(start):
        export._save_tensorflow(network, network, str(folder))
    return _names(folder, start)


@pytest.mark.parametrize("name", LAYERS)
def test_the_names_depend_only_on_what_is_exported(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "int64" if name == "a table" else "float32"
    inputs = {"x": keras.Input((4,), dtype=kind, name="x")}
    outputs = {"y": LAYERS[name]()(inputs["x"])}
    network = keras.Model(inputs, outputs)
    first = _exported(network, tmp_path / "first")
    for number in range(500):
        tf.constant(number)
    tf.function(network)({"x": tf.ones((3, 4), kind)})
    assert _exported(network, tmp_path / "second") == first
    # Seen to fail with the numbers of the process.
    monkeypatch.setattr(export, "own_numbers", contextlib.nullcontext)
    monkeypatch.setattr(export, "check_numbers", lambda _: None)
    assert _exported(network, tmp_path / "third") != first


def test_a_function_that_was_traced_elsewhere_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"x": keras.Input((4,), name="x")}
    network = keras.Model(inputs, {"y": keras.layers.Dense(1)(inputs["x"])})
    monkeypatch.setattr(export, "own_numbers", contextlib.nullcontext)
    with pytest.raises(InputError, match="names tell what was computed"):
        export._save_tensorflow(network, network, str(tmp_path / "model"))


def test_the_functions_of_a_layer_are_traced_again(tmp_path: pathlib.Path) -> None:
    class Twice(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.twice = tf.function(lambda values: 2 * values)

        @tf.function
        def call(self, values: Any) -> Any:
            return self.twice(values)

    inputs = {"x": keras.Input((4,), name="x")}
    network = keras.Model(inputs, {"y": Twice()(inputs["x"])})
    network({"x": tf.ones((3, 4))})
    whole = tf.function(network, input_signature=[{"x": tf.TensorSpec((None, 4))}])
    whole.get_concrete_function()
    export._save_tensorflow(network, network, str(tmp_path / "model"))


def test_tensorflow_counts_as_before_afterwards() -> None:
    counter = pywrap_tfe.TFE_Py_UID
    with contextlib.suppress(KeyError), own_numbers.own_numbers():
        assert pywrap_tfe.TFE_Py_UID() >= own_numbers._FIRST
        raise KeyError
    assert pywrap_tfe.TFE_Py_UID is counter


def test_a_model_does_not_tell_how_many_rows_its_batches_had(
    tmp_path: pathlib.Path,
) -> None:
    """Poisson batches of more rows are more physical batches, each with its tensors."""
    found = []
    for rows in (3, 9):
        made = write_batches(
            tmp_path / f"batches{rows}", [make_rows(rows)] * 2,
            truncated_batch_size=None, physical_batch_size=4,
        )  # fmt: skip
        settings = TrainSettings(noise_multiplier=1.0, embedding_dim=2, hidden=(4,))
        run = tmp_path / f"run{rows}"
        start = next(_STARTS)
        with _as_the_first(start):
            train(Request(settings=settings, batches=made.path, held_out=None, run=run))
        names = _names(run / "saved_model", start)
        # Keras saves the variables in the order of a set.
        of_variables = re.compile("[^{]*(embeddings|hidden|logit)")
        with zipfile.ZipFile(run / "model.keras") as archive:
            config = archive.read("config.json").decode()
        # Of what was made before the first step.
        names.append(re.sub(r'"shared_object_id": \d+', "", config))
        found.append([name for name in names if not of_variables.match(name)])
    assert found[0] == found[1]
