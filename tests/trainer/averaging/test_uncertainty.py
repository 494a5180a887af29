"""Intervals from kept iterates: by hand, by a closed form, and against other runs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.trainer.bounded import float_noise, unbounded
from tests.trainer.conftest import write_held_out
from trainer.averaging.aggregates import Outputs, OutputsByName
from trainer.averaging.uncertainty import (
    PREDICTION,
    student_interval,
    write_uncertainty,
)
from trainer.core.step.dp_step import Step
from trainer.model.metrics import BINARY
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import keras, tf
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")


def _outputs(logits: Sequence[Sequence[float]]) -> OutputsByName:
    outputs = OutputsByName(BINARY, PREDICTION)
    for row in logits:
        outputs.add(np.array(row))
    return outputs


def test_the_interval_by_hand() -> None:
    # t of 3 degrees of freedom at 0.975 is 3.182446 (any table).
    low, high = student_interval(
        np.array([0.5, 0.99]), np.array([0.04, 0.04]), num_iterates=4, level=0.95
    )
    np.testing.assert_allclose(low, [0.5 - 0.06364893, 0.99 - 0.06364893], atol=1e-7)
    np.testing.assert_allclose(high, [0.5 + 0.06364893, 1.0], atol=1e-7)


def test_the_interval_covers_the_mean_of_independent_normal_draws() -> None:
    # 40,000 intervals: the standard error of a coverage of 0.9 is 0.0015; 5 of them are
    # exceeded with probability 6e-7.  Normal instead of Student: 0.81 for k = 3.
    draws = np.random.default_rng(0).normal(0.5, 0.01, (40_000, 3))
    low, high = student_interval(
        draws.mean(1), draws.std(1, ddof=1), num_iterates=3, level=0.9
    )
    covered = ((low <= 0.5) & (high >= 0.5)).mean()
    assert abs(covered - 0.9) < 0.0075


def test_the_file_has_a_row_per_example(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "uncertainty.parquet"
    outputs = _outputs([[0.0, 2.0], [0.2, 1.0], [-0.1, 1.5]])
    summary = write_uncertainty(path, outputs, steps=(6, 8, 10), level=0.9)
    table = pq.read_table(path)
    assert table.column_names == ["prediction", "stddev", "low", "high"]
    columns = {name: np.array(table[name]) for name in table.column_names}
    np.testing.assert_array_equal(columns["prediction"], outputs[PREDICTION].mean)
    half = 2.919986 * columns["stddev"] / np.sqrt(3)
    np.testing.assert_allclose(columns["high"] - columns["prediction"], half, rtol=1e-6)
    np.testing.assert_allclose(columns["prediction"] - columns["low"], half, rtol=1e-6)
    assert summary["mean_width"] == pytest.approx(2 * half.mean(), rel=1e-6)


_CONTRACTION = 0.8
_COORDINATES = 20_000


def _quadratic_iterates(steps: Sequence[int]) -> Outputs:
    """Predictions of DP-SGD on 20,000 quadratics of one number after ``steps``.

    The clipped sum is b lambda theta; a step is theta -> a theta - eta noise / b with
    a = 1 - eta lambda, an autoregression whose stationary variance is
    (eta stddev / b)^2 / (1 - a^2).
    """
    theta = tf.Variable(tf.zeros(_COORDINATES))
    summed = unbounded(lambda columns, weight: [8.0 * 0.4 * theta], 8)
    step = Step([theta], summed, keras.optimizers.SGD(0.5))  # a = 1 - 0.5 * 0.4
    outputs = Outputs(BINARY)
    for done in range(1, max(steps) + 1):
        step.begin(float_noise(bytes(range(32)), done, step.shapes, 0.16))
        step.add({}, 0.0)
        step.finish()
        if done in steps:
            outputs.add(theta.numpy())
    return outputs


@pytest.mark.parametrize(("spacing", "share"), [(15, 0.99), (1, 0.45)])
def test_the_variance_is_that_of_the_stationary_distribution_if_iterates_are_far_apart(
    spacing: int, share: float
) -> None:
    # For k draws of an autoregression E S^2 = V (1 - mean correlation of two of them).
    count = 8
    stationary = (0.5 * 0.16 / 8) ** 2 / (1 - _CONTRACTION**2)
    correlation = sum(
        (count - lag) * _CONTRACTION ** (spacing * lag) for lag in range(1, count)
    ) / (count * (count - 1) / 2)
    assert 1 - correlation == pytest.approx(share, abs=0.01)
    steps = range(40, 40 + count * spacing, spacing)
    # Near 0 the probability is 1/2 + theta / 4, up to 1e-4 of that.
    found = 16 * float((_quadratic_iterates(steps).stddev ** 2).mean())
    # 20,000 independent S^2 of 7 degrees of freedom or fewer, at least 1 of them: the
    # relative standard error is at most sqrt(2 / 20,000) = 0.01, and sqrt(2 / 7 /
    # 20,000) = 0.004 for independent iterates.  Five of them: 6e-7.
    tolerance = 5 * (0.004 if spacing > 1 else 0.01)
    assert found / (stationary * (1 - correlation)) == pytest.approx(1, abs=tolerance)


# -- logistic regression: one run against others ---------------------------------------

_RATE, _CLIP, _NOISE = 0.3, 3.0, 0.3
_EXPECTED, _EXAMPLES, _FEATURES = 8, 200, 13


def _independent_runs(
    inputs: np.ndarray, labels: np.ndarray, held_out: np.ndarray, *, steps: int
) -> np.ndarray:
    """Predictions of 300 runs, (runs, held-out examples), in NumPy."""
    random = np.random.default_rng(5)
    inputs = np.hstack([inputs, np.ones((len(inputs), 1))])
    norms = np.linalg.norm(inputs, axis=1)
    theta = np.zeros((300, inputs.shape[1]))
    for _ in range(steps):
        chosen = random.random((len(theta), len(inputs))) < _EXPECTED / len(inputs)
        residual = 1 / (1 + np.exp(-theta @ inputs.T)) - labels
        scale = np.minimum(1, _CLIP / np.maximum(np.abs(residual) * norms, 1e-12))
        total = (chosen * residual * scale) @ inputs
        total += random.normal(0, _NOISE * _CLIP, theta.shape)
        theta -= _RATE * total / _EXPECTED
    logits = theta @ np.hstack([held_out, np.ones((len(held_out), 1))]).T
    return 1 / (1 + np.exp(-logits))


@pytest.fixture
def logistic(
    rows: Any, batch_folder: Callable[..., Any], tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:  # fmt: skip
    """``logistic(steps, spacing)``: predictions of other runs, stddev of one run."""
    (tmp_path / "logistic.py").write_text(
        "import keras\n"
        "def make(manifest):\n"
        f"    x = keras.Input(({_FEATURES},), name='integers')\n"
        "    return keras.Model(x, keras.layers.Dense(1, "
        "kernel_initializer='zeros')(x))\n"
    )
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    table = rows(_EXAMPLES + 100)
    table["integers"] = random.normal(0, 1, table["integers"].shape)
    score = table["integers"] @ np.linspace(-0.5, 0.5, _FEATURES)
    table["label"] = random.random(len(table)) < 1 / (1 + np.exp(-score))
    examples, others = table[:_EXAMPLES], table[_EXAMPLES:]

    def run(steps: int, spacing: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = random.random((steps, _EXAMPLES)) < _EXPECTED / _EXAMPLES
        folder = batch_folder(
            [examples[mask] for mask in chosen], f"batches-{spacing}",
            expected_batch_size=_EXPECTED, num_examples=_EXAMPLES,
            truncated_batch_size=32, physical_batch_size=32, steps_per_file=400,
        )  # fmt: skip
        held_out = write_held_out(tmp_path / f"held-out-{spacing}", others)
        settings = TrainSettings(
            optimizer="sgd", learning_rate=_RATE, l2_norm_clip=_CLIP,
            noise_multiplier=_NOISE, model="logistic:make", eval_every=steps,
            keep_last=12, keep_every=spacing, uncertainty=0.95,
        )  # fmt: skip
        request = Request(
            settings=settings, batches=folder.path, held_out=held_out,
            run=tmp_path / f"run-{spacing}",
        )  # fmt: skip
        _fix_randomness(request.run / "private")
        train(request)
        table = pq.read_table(request.run / "uncertainty.parquet")
        runs = _independent_runs(
            examples["integers"], examples["label"], others["integers"], steps=200
        )
        return runs, np.array(table["stddev"])

    return run


def _fix_randomness(private: pathlib.Path) -> None:
    private.mkdir(parents=True, mode=0o700)
    for name, value in (("noise.key", "0" * 64), ("run.id", "1" * 32)):
        (private / name).write_text(value + "\n")
        (private / name).chmod(0o600)


@pytest.mark.parametrize(("spacing", "agrees"), [(40, True), (1, False)])
def test_logistic_regression_varies_over_iterates_as_over_independent_runs(
    spacing: int, agrees: bool, logistic: Callable[..., Any]
) -> None:
    count = 12
    runs, stddev = logistic(steps=100 + (count - 1) * spacing, spacing=spacing)
    ratio = (stddev**2).mean() / runs.var(0, ddof=1).mean()
    # The mean over examples of S^2 is the trace of a sample covariance of k nearly
    # independent, nearly normal vectors: its relative variance is 2 / (k - 1) times
    # the sum of the squared eigenvalues over the square of their sum.
    eigenvalues = np.linalg.svd(runs - runs.mean(0), compute_uv=False) ** 2
    share = (eigenvalues**2).sum() / eigenvalues.sum() ** 2
    error = np.sqrt(share * (2 / (count - 1) + 2 / (len(runs) - 1)))
    # Four of them: wrong with probability 6e-5.  The bound excludes iterates that are
    # one step apart, whose S^2 is far too small.
    assert 4 * error < 0.6
    assert (abs(ratio - 1) < 4 * error) == agrees
