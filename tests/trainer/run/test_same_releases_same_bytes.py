"""Runs of the same releases on other rows write the same files, and say the same.

Whatever differs here is told beside the weights, and covered by no epsilon.  Gradients
are 0 and the secret is one, so that the weights are equal; the rows of a step need none
to three physical batches, and some values are infinite.

Keyed names of the batches, dates and random names may differ.  Lazy noise is drawn for
reads: its weights have one law, not the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.conftest import make_rows, write_batches
from tests.trainer.run.whole_runs import Said, load_model, private_settings
from trainer import export
from trainer.core.step.bounded_sum import BoundedSum
from trainer.core.tf_compat import keras, saved_model_pb2, tf
from trainer.keras_model import make_private
from trainer.run.preflight import Request
from trainer.train import train

#: Numbers of rows of the steps of two runs.
STEPS = (3, 2, 4, 1), (9, 0, 5, 12)
#: A random name and hashes of the other files; when Keras saved.
NAMES_AND_DATES = "fingerprint.pb", "metadata.json"


def _zero(one: Any) -> Any:
    if isinstance(one, tf.IndexedSlices):
        return tf.IndexedSlices(0 * one.values, one.indices, one.dense_shape)
    return 0 * one


@pytest.fixture
def releases_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_of = BoundedSum.__call__
    monkeypatch.setattr(
        BoundedSum, "__call__", lambda *given: [*map(_zero, sum_of(*given))]
    )


def _public(run: pathlib.Path, start: int) -> dict[str, bytes]:
    """The bytes of each public file, and of each in an archive, by name."""
    found = {}
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        if name.startswith("private") or path.is_dir():
            continue
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            found |= {f"{name}/{one}": archive.read(one) for one in archive.namelist()}
        else:
            found[name] = without_numbers(path, start)
    record = found["run_record.json"]
    keyed = rb'(?<="records_id": |  "checksum": )"\w+"'
    found["run_record.json"] = re.sub(keyed, b"", record)
    # Digests of files that are compared here, numbers of exports included.
    found["serving.json"] = re.sub(rb'"\w{64}"', b"", found["serving.json"])
    return {k: v for k, v in found.items() if not k.endswith(NAMES_AND_DATES)}


def _train(request: Request, start: int) -> tuple[dict[str, bytes], list[str]]:
    said = Said()
    with as_the_first(start):
        train(request, said)
    return _public(request.run, start), said.lines


@pytest.mark.usefixtures("releases_are_equal", "one_secret")
def test_files_and_messages_tell_nothing_beside_the_weights(
    request_for: Any, tmp_path: pathlib.Path
) -> None:
    found = []
    for sizes in STEPS:
        rows = [make_rows(size, 10 * size) for size in sizes]
        rows[0]["integers"][1] = np.inf if sizes[0] > 4 else 1
        made = write_batches(
            tmp_path / f"batches{sizes[0]}", rows,
            truncated_batch_size=None, physical_batch_size=4,
        )  # fmt: skip
        request = request_for(
            f"run{sizes[0]}",
            batches=made.path,
            settings=private_settings(l2_norm_clip=None, ema_decay=0.9, keep_last=2),
        )
        found.append(_train(request, next_start()))
    (files, said), (other_files, also_said) = found
    assert said == also_said
    names = files.keys() | other_files.keys()
    assert [n for n in sorted(names) if files.get(n) != other_files.get(n)] == []
    assert {"model.keras/config.json", "saved_model/saved_model.pb"} < names


# -- the names in files of a model -----------------------------------------------------


def _branch(values: Any) -> Any:
    return tf.cond(tf.reduce_sum(values) > 0, lambda: values, lambda: -values)


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


@pytest.mark.thorough
def test_the_names_depend_only_on_what_is_exported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a look-up table, a branch and a loop, which are functions of their own."""
    inputs = {"x": keras.Input((4,), dtype="int64", name="x")}
    ids = keras.layers.IntegerLookup(vocabulary=[3, 5])(inputs["x"])
    values = keras.ops.cast(ids, "float32")
    values = keras.layers.Lambda(_branch, output_shape=(4,))(values)
    values = keras.layers.LSTM(2)(keras.layers.Reshape((2, 2))(values))
    network = keras.Model(inputs, {"y": values})
    first = _exported(network, tmp_path / "first")
    for number in range(500):
        tf.constant(number)
    tf.function(network)({"x": tf.ones((3, 4), "int64")})
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
