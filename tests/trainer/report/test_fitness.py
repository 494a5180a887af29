"""No constant beats guessing, and a model that does not either is called useless."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.model import metrics
from trainer.model.metrics import guessing
from trainer.report.run_files import warnings

RANDOM = np.random.default_rng(0)


def _log_loss(labels: np.ndarray, chances: np.ndarray) -> float:
    return -float(np.log(chances[labels]).mean())


def test_no_constant_is_better_of_two_classes() -> None:
    labels = (RANDOM.random(1000) < 0.3).astype("i1")
    found = guessing(labels, task="binary", loss="binary_crossentropy")
    assert found is not None
    for logit in np.linspace(-4, 4, 81):
        constant = metrics.binary_metrics(labels, np.full(1000, logit))
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


def test_it_is_not_known_of_other_losses_and_of_several_labels() -> None:
    labels = np.ones(3)
    assert guessing(labels, task="other", loss="module:function") is None
    assert guessing({"a": labels}, task="binary", loss="binary_crossentropy") is None


BOTH = {"auc": 0.5, "log_loss": 0.6, "accuracy": 0.7}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"auc": 0.6, "log_loss": 0.61}, "no better than guessing: log loss 0.6100"),
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
    assert metrics.calibration_error(labels, logits) < 0.005
    # Twice the logits are too sure by the mean of |s(2 x) - s(x)|.
    wanted = np.abs(1 / (1 + np.exp(-2 * logits)) - 1 / (1 + np.exp(-logits))).mean()
    found = metrics.calibration_error(labels, 2 * logits)
    assert found == pytest.approx(wanted, abs=0.005)
