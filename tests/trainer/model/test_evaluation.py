"""Metrics of held-out examples, and their files."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from tests.command_line import invoke
from tests.trainer.conftest import write_held_out
from trainer.model.evaluation import Evaluator, HeldOut
from trainer.model.metrics import (
    Metrics,
    auc,
    binary_metrics,
    calibration_error,
    guessing,
)
from trainer.model.rows import Target
from trainer.model.trainable_model import TrainableModel
from trainer.models import make_loss, make_model
from trainer.report.run_files import warnings
from trainer.run.preflight import Request, check
from trainer.settings.train_settings import TrainSettings


def test_auc_is_the_probability_that_a_positive_scores_higher() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 200)
    scores = random.integers(0, 12, 200).astype("f4")  # many ties
    positive, negative = scores[labels > 0], scores[labels == 0]
    above = (positive[:, None] > negative).mean()
    ties = (positive[:, None] == negative).mean()
    assert auc(labels, scores) == pytest.approx(above + ties / 2, abs=1e-12)


def _opened(folder: pathlib.Path, manifest: Any) -> HeldOut:
    return HeldOut(folder, manifest.columns, manifest.dataset)


@pytest.fixture
def model(small_batches: Any) -> TrainableModel:
    return make_model(small_batches.manifest, embedding_dim=2, hidden=(4,))


@pytest.fixture
def metrics(small_batches: Any, held_out: Any, model: TrainableModel) -> Any:
    def make(predict: Any, metric: Any = None) -> Metrics:
        source = _opened(held_out, small_batches.manifest)
        return Evaluator(
            held_out=source, model=model, predict=predict, metric=metric
        ).metrics()

    return make


def test_metrics_are_those_of_the_predictions(metrics: Any) -> None:
    assert metrics(lambda columns: 2.0 * columns["label"] - 1.0) == {
        "auc": 1.0,
        "log_loss": pytest.approx(np.log1p(np.exp(-1))),
        "accuracy": 1.0,
        # At most one of ten groups has rows of both labels, whose errors cancel.
        "calibration_error": pytest.approx(1 / (1 + np.exp(1)), rel=0.11),
        "num_examples": 300,
    }


def test_a_metric_of_ones_own_sees_what_the_exported_model_gives(
    metrics: Any, rows: Any
) -> None:
    def brier(labels: np.ndarray, predictions: np.ndarray) -> float:
        assert predictions.shape == (300, 1)
        return float(np.mean((labels - predictions[:, 0]) ** 2))

    found = metrics(lambda rows: np.full(len(rows["label"]), 2.0), brier)
    labels = rows(300, seed=99)["label"]
    wanted = np.mean((labels - 1 / (1 + np.exp(-2))) ** 2)
    assert found["brier"] == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(InputError, match="metric <lambda> to return one finite number"):
        metrics(lambda rows: rows["label"] * 1.0, lambda *_: np.nan)


@pytest.mark.parametrize(
    ("loss", "unit"),
    [("mean_squared_error", 100.0), ("mean_absolute_error", 10.0), ("huber", 1.0)],
)
def test_numbers_of_a_range_are_evaluated_in_the_unit_of_their_label(
    loss: str, unit: float, small_batches: Any, held_out: Any, model: TrainableModel
) -> None:
    seen: list[np.ndarray] = []

    def keep(*given: np.ndarray) -> float:
        seen.extend(given)
        return 0.0

    found = []
    scaled_model = dataclasses.replace(model, loss=make_loss(loss))
    for target in (None, Target(name="y", range=(10.0, 30.0))):
        evaluator = Evaluator(
            held_out=_opened(held_out, small_batches.manifest),
            model=scaled_model,
            predict=lambda rows: 0.5 - rows["label"].astype("f4")[:, None],
            metric=keep,
            target=target,
        )
        guessing = evaluator.guessing() or {"loss": 0.0}
        found.append((evaluator.metrics()["loss"], guessing["loss"]))
    assert found[1] == pytest.approx([unit * each for each in found[0]])
    for scaled, told in zip(seen[:2], seen[2:], strict=True):
        np.testing.assert_allclose(told, 20 + 10 * scaled)


def test_labels_that_the_loss_does_not_take_are_refused_without_their_content(
    metrics: Any, held_out: Any
) -> None:
    labels = pa.array([0, 1, 113] * 100, pa.int8())
    _rewrite(held_out, lambda t: t.set_column(0, "label", labels))
    message = "column label of --eval to be 0 or 1"
    with pytest.raises(InputError, match=message) as error:
        metrics(lambda columns: 1.0 * columns["label"])
    assert "113" not in str(error.value)


def test_predictions_that_are_not_finite_are_an_error(metrics: Any) -> None:
    for value in (np.nan, np.inf):
        predict = lambda rows, v=value: np.where(rows["label"], 0.0, v)  # noqa: E731
        with pytest.raises(InputError, match="--learning-rate"):
            metrics(predict)


def _rewrite(folder: pathlib.Path, change: Any) -> None:
    path = folder / "part-00000.parquet"
    pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["label"]), "column label"),
        (lambda t: t.drop_columns(["label", t.column_names[-1]]), "columns "),
        (lambda t: t.set_column(0, "label", t["label"].cast(pa.int16())), "int8"),
        (lambda t: t.replace_schema_metadata({}), "description differs"),
        (lambda t: t.slice(0, 0), "has none"),
    ],
)
def test_files_that_do_not_match_the_batches_are_refused(
    change: Any, message: str, small_batches: Any, held_out: Any
) -> None:
    _rewrite(held_out, change)
    with pytest.raises(InputError, match=message):
        _opened(held_out, small_batches.manifest)


@pytest.fixture
def sampled(tmp_path: pathlib.Path, rows: Any, warm_starts: None) -> pathlib.Path:
    """A folder with the input ``train`` and the ``batches`` sampled from it."""
    write_held_out(tmp_path / "train", rows(200))
    empty = pq.read_table(tmp_path / "train/part-00000.parquet").slice(0, 0)
    pq.write_table(empty, tmp_path / "train/part-00001.parquet")
    done = invoke([
        "batches", f"--input={tmp_path}/train", f"--out={tmp_path}/batches",
        "--batch-size=20", "--epochs=1", "--sampler=poisson",
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    return tmp_path


def _checked(sampled: pathlib.Path, held_out: pathlib.Path) -> Any:
    return check(
        Request(
            settings=TrainSettings(noise_multiplier=1.0, l2_norm_clip=1.0),
            batches=sampled / "batches",
            held_out=held_out,
            run=sampled / "run",
        )
    )


def test_a_file_that_was_sampled_from_is_refused_under_any_name(
    sampled: pathlib.Path, held_out: pathlib.Path
) -> None:
    _checked(sampled, held_out)
    shutil.copy(sampled / "train/part-00001.parquet", held_out / "empty.parquet")
    _checked(sampled, held_out)  # of no rows none is a training example
    source, name = sampled / "train/part-00000.parquet", held_out / "other.parquet"
    ways: list[Callable[[], object]] = [
        lambda: shutil.copy(source, name),
        lambda: name.symlink_to(source),
    ]
    for way in ways:
        way()
        with pytest.raises(InputError, match=r"no training examples; other\.parquet"):
            _checked(sampled, held_out)
        name.unlink()
    with pytest.raises(InputError, match=r"no training examples; part-00000\.parquet"):
        _checked(sampled, sampled / "train")
    assert not (sampled / "run").exists()


# -- whether a model is fit for use ----------------------------------------------------


RANDOM = np.random.default_rng(0)


def _log_loss(labels: np.ndarray, chances: np.ndarray) -> float:
    return -float(np.log(chances[labels]).mean())


def test_no_constant_is_better_of_two_classes() -> None:
    labels = (RANDOM.random(1000) < 0.3).astype("i1")
    found = guessing(labels, task="binary", loss="binary_crossentropy")
    assert found is not None
    for logit in np.linspace(-4, 4, 81):
        constant = binary_metrics(labels, np.full(1000, logit))
        assert constant["auc"] == found["auc"]
        assert constant["log_loss"] >= found["log_loss"]
        assert constant["accuracy"] <= found["accuracy"]


@pytest.mark.parametrize("one_hot", [False, True])
def test_no_constant_is_better_of_several_classes(one_hot: bool) -> None:
    labels = RANDOM.choice(3, 1000, p=[0.2, 0.5, 0.3])
    given = np.eye(3)[labels] if one_hot else labels
    loss = "categorical_crossentropy" if one_hot else "sparse_categorical_crossentropy"
    found = guessing(given, task="classes", loss=loss)
    assert found is not None
    for chances in RANDOM.dirichlet([1, 1, 1], 200):
        assert _log_loss(labels, chances) >= found["log_loss"]
        assert (labels == chances.argmax()).mean() <= found["accuracy"]


@pytest.mark.parametrize(
    ("loss", "error"), [("mean_squared_error", np.square), ("mean_absolute_error", abs)]
)
def test_no_constant_is_better_of_numbers(loss: str, error: Any) -> None:
    labels = RANDOM.exponential(size=(1000, 1))
    found = guessing(labels, task="other", loss=loss)
    assert found is not None
    for constant in np.linspace(0, 3, 61):
        assert error(labels - constant).mean() >= found["loss"]


BOTH = {"auc": 0.5, "log_loss": 0.6, "accuracy": 0.7}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"auc": 0.49, "log_loss": 0.5}, "no better than guessing: AUC 0.4900"),
        (
            {"auc": 0.9, "log_loss": 0.5, "calibration_error": 0.2},
            "probabilities are off by 0.20",
        ),
    ],
)
def test_a_model_that_is_not_fit_for_use_is_named(found: Any, words: str) -> None:
    (line,) = warnings({**found, "num_examples": 1000, "guessing": BOTH})
    assert words in line


def test_a_useful_model_and_one_without_metrics_get_no_warning() -> None:
    good = {"auc": 0.6, "log_loss": 0.59, "accuracy": 0.6, "calibration_error": 0.04}
    for found in (good, {"auc": None, "log_loss": None}):
        assert not list(warnings({**found, "num_examples": 1000, "guessing": BOTH}))


def test_perfect_probabilities_have_a_small_calibration_error() -> None:
    logits = RANDOM.normal(0, 2, 100_000)
    labels = RANDOM.random(100_000) < 1 / (1 + np.exp(-logits))
    # Of a group the mean error is below sqrt(p (1 - p) / 10,000) <= 0.005.
    assert calibration_error(labels, logits) < 0.005
    # Twice the logits are too sure by the mean of |s(2 x) - s(x)|.
    wanted = np.abs(1 / (1 + np.exp(-2 * logits)) - 1 / (1 + np.exp(-logits))).mean()
    found = calibration_error(labels, 2 * logits)
    assert found == pytest.approx(wanted, abs=0.005)
