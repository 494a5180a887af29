"""No error quotes a training or held-out example, whatever raises it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.conftest import write_held_out
from tests.trainer.run.whole_runs import private_model
from trainer.core.run.redact_errors import redact_errors
from trainer.core.tf_compat import keras
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

#: An id that no embedding here has, and that no message may hold.
SECRET = 79850

OWN_CODE = f"""
import numpy as np
import tensorflow as tf
import keras


def make(manifest):
    ids = keras.Input((26,), dtype="int32", name="categories")
    table = keras.layers.Embedding(10, 1)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))


def dense(manifest):
    ids = keras.Input((26,), dtype="int32", name="categories")
    return keras.Model(ids, keras.layers.Dense(1)(keras.ops.cast(ids, "float32")))


def metric(labels, predictions):
    raise ValueError(f"row {{labels.argmax()}} {SECRET}")


def loss(labels, outputs):
    tf.debugging.Assert(tf.reduce_all(labels <= 1), ["label {SECRET}", labels])
    return (tf.cast(labels, tf.float32) - outputs[:, 0]) ** 2
"""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and all errors chained to it."""
    if error is not None:
        yield error
        yield from _chain(error.__cause__)
        yield from _chain(error.__context__)


def _assert_withheld(error: InputError, capfd: Any) -> None:
    assert "withheld" in str(error)
    assert "\n" not in str(error)
    for one in _chain(error):
        assert str(SECRET) not in "".join(traceback.format_exception(one))
        assert str(SECRET) not in repr(one)
    assert str(SECRET) not in "".join(capfd.readouterr())


@pytest.fixture
def own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "withheld_code.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "withheld_code", raising=False)
    return "withheld_code"


def _rows(rows: Any, *, bad: str | None, seed: int = 0) -> np.ndarray:
    """Eight rows, one of them with a bad id or label."""
    made = rows(8, seed)
    if bad == "id":
        made["categories"][5] = SECRET
    elif bad == "label":
        made["label"][5] = 113
    return made


@pytest.fixture
def batches(batch_folder: Any, rows: Any) -> Any:
    """Three steps; the second has the bad row, or none has."""
    return lambda bad: batch_folder(
        [_rows(rows, bad=bad if step == 1 else None, seed=step) for step in range(3)]
    )


@pytest.fixture
def request_for(batches: Any, rows: Any, tmp_path: pathlib.Path) -> Any:
    def make(
        *, bad: str | None = None, bad_eval: str | None = None, **settings: Any
    ) -> Request:
        fields = {"noise_multiplier": 1.0, "l2_norm_clip": 1.0, **settings}
        return Request(
            settings=TrainSettings(**fields),
            batches=batches(bad).path,
            held_out=write_held_out(
                tmp_path / "test", _rows(rows, bad=bad_eval, seed=9)
            ),
            run=tmp_path / "run",
        )

    return make


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ({"bad": "id"}, {"model": "make"}),
        ({"bad": "label"}, {"model": "dense", "loss": "loss"}),
        ({"bad_eval": "id"}, {"model": "make"}),
        ({}, {"model": "make", "metric": "metric"}),
    ],
)
def test_train_withholds_what_is_raised_on_an_example(
    where: Any, settings: Any, request_for: Any, own: str, capfd: Any
) -> None:
    named = {k: f"{own}:{v}" if v is not True else v for k, v in settings.items()}
    with pytest.raises(InputError) as error:
        train(request_for(**where, **named))
    _assert_withheld(error.value, capfd)
    if "metric" in settings:
        assert f"{own}.py, line" in str(error.value)


def _network() -> Any:
    ids = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Flatten()(keras.layers.Embedding(10, 1)(ids))
    return keras.Model(ids, keras.layers.Dense(1)(values))


@pytest.fixture
def private(batches: Any, tmp_path: pathlib.Path) -> Any:
    return lambda bad=None: private_model(batches(bad), tmp_path / "run", _network())


def test_fit_withholds_what_is_raised_on_a_training_example(
    private: Any, capfd: Any
) -> None:
    model = private("id")
    with pytest.raises(InputError) as error:
        model.fit(verbose=0)
    _assert_withheld(error.value, capfd)
    assert "labels outside the classes, for ids outside" in str(error.value)
    with pytest.raises(InputError, match="for good"):
        model.fit(verbose=0)


def test_a_private_model_withholds_what_is_raised_on_a_held_out_example(
    private: Any, rows: Any, capfd: Any
) -> None:
    found = _rows(rows, bad="id")
    x, y = {"categories": found["categories"]}, found["label"]
    model = private()
    for call in (
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.predict(x, verbose=0),
        lambda: model.test_on_batch(x, y),
        lambda: model.predict_on_batch(x),
        lambda: model.fit(validation_data=(x, y), verbose=0),
    ):
        with pytest.raises(InputError) as error:
            call()
        _assert_withheld(error.value, capfd)


#: A notebook may import Keras first, whose TensorFlow then logs warnings.
KERAS_FIRST = f"""
import tensorflow as tf
from trainer.core.run.redact_errors import (redact_errors)

look_up = tf.function(lambda row: tf.gather(tf.zeros(10), row))
try:
    redact_errors(look_up)(tf.constant([{SECRET}]))
except Exception as error:
    print(error)
try:
    look_up(tf.constant([11]))
except tf.errors.InvalidArgumentError:
    pass
"""


@pytest.mark.thorough
def test_tensorflow_logs_no_example_if_it_was_imported_first() -> None:
    """Seen to fail: it warned that "indices[0] = 79850 is not in [0, 10)"."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")}
    found = subprocess.run(
        [sys.executable, "-c", KERAS_FIRST],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "is withheld" in found.stdout
    assert str(SECRET) not in found.stdout + found.stderr
    assert "= 11 is not in" in found.stderr  # what is not an example's is logged


def test_what_was_refused_keeps_its_words_and_loses_what_it_came_from() -> None:
    @redact_errors
    def refuse() -> None:
        try:
            raise ValueError(SECRET)
        except ValueError:
            raise InputError("Expected n=3 to be less.") from None

    with pytest.raises(InputError, match="Expected n=3") as error:
        refuse()
    assert [str(one) for one in _chain(error.value)] == ["Expected n=3 to be less."]
