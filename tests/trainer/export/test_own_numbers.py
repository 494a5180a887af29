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

from accounting.core.validation import InputError
from tests.trainer.run.whole_runs import load_model
from trainer import export
from trainer.core.tf_compat import keras, saved_model_pb2, tf
from trainer.keras_model import make_private


def _branch(values: Any) -> Any:
    return tf.cond(tf.reduce_sum(values) > 0, lambda: values, lambda: -values)


LAYERS: dict[str, Callable[[], Any]] = {
    "a branch": lambda: keras.layers.Lambda(_branch, output_shape=(4,)),
    "a recurrent layer": lambda: keras.Sequential(
        [keras.layers.Reshape((2, 2)), keras.layers.LSTM(2)]
    ),
    "a table": lambda: keras.layers.IntegerLookup(vocabulary=[3, 5]),
}  # fmt: skip


#: Exports begin at other numbers, of as many digits: TensorFlow registers names once.
_STARTS = itertools.count(export._FIRST, 10**12)


def next_start() -> int:
    """Returns where the numbers of the next exports begin."""
    return next(_STARTS)


@contextlib.contextmanager
def as_the_first(start: int) -> Iterator[None]:
    """The next exports have the numbers of the first of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_NUMBERS", itertools.count(start))
        yield


def without_numbers(path: pathlib.Path, start: int) -> bytes:
    """The bytes of a file as if its numbers began at 0, and functions in one order."""
    content = path.read_bytes()
    if path.name != "saved_model.pb":
        return content
    # TensorFlow writes functions in the order of a hash of their names.
    found = saved_model_pb2.SavedModel()
    found.ParseFromString(content)
    for graph in found.meta_graphs:
        graph.graph_def.library.function.sort(key=lambda one: one.signature.name)
    content = found.SerializeToString(deterministic=True)
    return re.sub(rb"\d{16}", lambda one: b"%016d" % (int(one[0]) - start), content)


def _exported(network: Any, folder: pathlib.Path) -> list[bytes]:
    """The files of a SavedModel but for one, which has a random name and hashes."""
    start = next_start()
    with as_the_first(start):
        export._save_tensorflow(network, network, str(folder))
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert paths.pop(0).name == "fingerprint.pb"
    return [without_numbers(path, start) for path in paths]


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


def test_keras_names_what_layers_share_by_no_address(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    inputs = keras.Input((13,), name="integers")
    outputs = keras.layers.Dense(1)(keras.layers.Dense(2)(inputs))
    model = make_private(
        keras.Model(inputs, outputs), batches=small_batches.path, run=tmp_path / "run",
        noise_multiplier=1.0, l2_norm_clip=1.0,
    )  # fmt: skip
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        config = archive.read("config.json").decode()
    numbers = re.findall(r'"shared_object_id": (\d+)', config)
    assert numbers
    assert max(map(int, numbers)) < 100
    assert load_model(tmp_path / "model.keras").count_params() == 31
