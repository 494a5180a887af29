"""Aggregates of kept iterates: formulas by hand, functions of users, intervals."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.core.validation import InputError
from trainer.averaging.averages import TrainingAverages
from trainer.averaging.iterates import (
    PREDICTION,
    Iterates,
    Outputs,
    OutputsByName,
    PastResults,
    WeightedMean,
    ema_weights,
    load_aggregate,
    majority_metrics,
    student_interval,
    uniform_weights,
    write_uncertainty,
)
from trainer.core.tf_compat import keras, tf
from trainer.model.evaluation import Evaluator
from trainer.model.losses import Loss, loss_by_name
from trainer.model.metrics import BINARY, CLASSES, Metrics, binary_metrics
from trainer.model.rows import Target
from trainer.model.trainable_model import TrainableModel
from trainer.settings.aggregation_settings import AggregationSettings


def _logit(probability: float) -> float:
    return float(np.log(probability / (1 - probability)))


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_the_weights_sum_to_one_and_do_not_fall(count: int, decay: float) -> None:
    weights = ema_weights(count, decay)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert (np.diff(weights) >= 0).all()
    assert (weights >= 0).all()
    recursive = np.zeros(count)
    for index in range(count):
        beta = 1.0 if index == 0 else (1 - decay) / (1 - decay ** (index + 1))
        recursive *= 1 - beta
        recursive[index] = beta
    # 1 - d^i cancels where d is next to 1.
    if decay < 0.999:
        np.testing.assert_allclose(weights, recursive, rtol=1e-6, atol=1e-12)


def test_the_mean_of_weights_by_hand() -> None:
    iterates = [
        [np.array([1.0, 2.0], "f4"), np.array(3.0, "f4")],
        [np.array([2.0, 0.0], "f4"), np.array(3.0, "f4")],
        [np.array([6.0, 1.0], "f4"), np.array(0.0, "f4")],
    ]
    upa = WeightedMean(uniform_weights(3))
    ema = WeightedMean(ema_weights(3, 0.5))  # 1/7, 2/7, 4/7
    for iterate in iterates:
        upa.add(iterate)
        ema.add(iterate)
    np.testing.assert_allclose(upa.values()[0], [3, 1], rtol=1e-6)
    np.testing.assert_allclose(upa.values()[1], 2, rtol=1e-6)
    np.testing.assert_allclose(ema.values()[0], [29 / 7, 6 / 7], rtol=1e-6)
    np.testing.assert_allclose(ema.values()[1], 9 / 7, rtol=1e-6)
    assert upa.values()[0].dtype == np.float32


def test_outputs_of_three_iterates_by_hand() -> None:
    # Probabilities of label 1, a row per iterate, a column per example.
    table = np.array([[0.2, 0.6, 0.9], [0.4, 0.4, 0.8], [0.6, 0.8, 0.7]])
    outputs = Outputs(BINARY)
    for row in table:
        outputs.add(np.array([_logit(p) for p in row]))
    np.testing.assert_allclose(outputs.mean, [0.4, 0.6, 0.8])
    np.testing.assert_allclose(outputs.outputs, [_logit(0.4), _logit(0.6), _logit(0.8)])
    # (0.04 + 0 + 0.04) / 2 and so on.
    np.testing.assert_allclose(outputs.stddev**2, [0.04, 0.04, 0.01])
    assert outputs.vote_share.tolist() == [1 / 3, 2 / 3, 1]
    assert outputs.majority.tolist() == [0, 1, 1]
    labels = np.array([0, 1, 0])
    opa = binary_metrics(labels, outputs.outputs)
    assert opa["auc"] == 0.5
    assert opa["log_loss"] == pytest.approx(-np.log(0.6 * 0.6 * 0.2) / 3)
    assert opa["accuracy"] == pytest.approx(2 / 3)
    omv = majority_metrics(labels, outputs)
    assert (omv["auc"], omv["log_loss"]) == (0.5, None)
    assert omv["accuracy"] == pytest.approx(2 / 3)


def test_the_logit_of_the_mean_is_finite_where_probabilities_round() -> None:
    outputs = Outputs(BINARY)
    outputs.add(np.array([800.0, -800.0]))
    outputs.add(np.array([700.0, -900.0]))
    assert outputs.mean.tolist() == [1.0, 0.0]
    # 1 - p is 1e-304 / 2 or so: -log of it is 700 + log 2.
    np.testing.assert_allclose(
        outputs.outputs, [700 + np.log(2), -800 + np.log(0.5)], rtol=1e-12
    )


def _log(table: list[list[float]]) -> np.ndarray:
    # Logits are the logarithms of probabilities, up to a number for each row.
    return np.log(np.array(table, np.float32)) + 7


def test_classes_by_hand() -> None:
    outputs = Outputs(CLASSES)
    outputs.add(_log([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]))
    outputs.add(_log([[0.1, 0.6, 0.3], [0.1, 0.1, 0.8]]))
    outputs.add(_log([[0.3, 0.3, 0.4], [0.4, 0.3, 0.3]]))
    mean = [[0.3, 0.4, 0.3], [0.2, 0.2, 0.6]]
    np.testing.assert_allclose(outputs.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(np.exp(outputs.outputs), mean, rtol=1e-6)
    assert outputs.outputs.dtype == np.float32
    np.testing.assert_allclose(outputs.stddev[0] ** 2, [0.04, 0.03, 0.01], rtol=1e-5)
    # One vote for each class of the first example: the first of them.
    np.testing.assert_allclose(outputs.vote_share, [[1 / 3] * 3, [1 / 3, 0, 2 / 3]])
    assert outputs.majority.tolist() == [0, 2]
    for labels in (np.array([1, 2]), np.eye(3)[[1, 2]]):
        found = majority_metrics(labels, outputs)
        assert (found["accuracy"], found["log_loss"]) == (0.5, None)


INPUTS = np.array([-2.0, -1.0, 1.0, 3.0])


class _Evaluator(Evaluator):
    """Stands in for held-out files with one column of four numbers."""

    def __init__(self, give: Callable[[], Any], loss: Loss, labels: Any) -> None:
        network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model = TrainableModel(network=network, description={}, loss=loss)
        nothing: Any = None
        super().__init__(held_out=nothing, model=model, predict=nothing)
        object.__setattr__(self, "found", lambda: (labels, give()))

    def outputs(self) -> tuple[Any, Any]:
        return self.found()  # type: ignore[attr-defined]

    def metrics(self) -> Metrics:
        return self.metrics_of(*self.outputs())


@pytest.fixture
def weight() -> Any:
    return tf.Variable(np.float32(0.1))


@pytest.fixture
def iterates(tmp_path: pathlib.Path) -> Iterates:
    kept = Iterates(run=tmp_path, steps=(1, 2, 3))
    for step, value in ((1, -1.0), (2, 0.5), (3, 2.0)):
        kept.keep(step, [np.float32(value)])
    return kept


def _of(give: Callable[[], Any], loss: Loss, labels: Any, kept: Iterates, weight: Any,
        **settings: Any) -> tuple[dict[str, Any], Any]:  # fmt: skip
    chosen = AggregationSettings(keep_last=3, **settings)
    evaluator = _Evaluator(give, loss, labels)
    return PastResults(kept, [weight], evaluator, chosen).evaluate(lambda name: None)


@pytest.mark.parametrize("one_hot", [False, True])
def test_classes_have_a_vote_a_mean_probability_and_an_interval_each(
    one_hot: bool, iterates: Iterates, weight: Any, tmp_path: pathlib.Path
) -> None:
    name = f"{'' if one_hot else 'sparse_'}categorical_crossentropy"
    classes = np.array([0, 1, 2, 2])
    scores = np.outer(INPUTS, [-1.0, 0.0, 1.0]).astype("f4")
    metrics, _ = _of(
        lambda: (weight * scores).numpy(), loss_by_name(name),
        np.eye(3)[classes] if one_hot else classes, iterates, weight, uncertainty=0.9,
    )  # fmt: skip
    logits = [value * scores for value in (-1.0, 0.5, 2.0)]
    each = [np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in logits]
    opa = np.mean(each, 0)
    loss = -np.log(opa[range(4), classes]).mean()
    assert metrics["opa"]["log_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["opa"]["accuracy"] == (opa.argmax(1) == classes).mean()
    # Two of three iterates say 0, 0, 2, 2.
    assert metrics["omv"]["accuracy"] == 0.75
    table = pq.read_table(tmp_path / "uncertainty.parquet")
    np.testing.assert_allclose(table["prediction"].to_pylist(), opa, rtol=1e-5)
    stddev = np.std(each, 0, ddof=1)
    np.testing.assert_allclose(table["stddev"].to_pylist(), stddev, rtol=1e-4)
    low = np.array(table["low"].to_pylist())
    assert low.min() == 0  # cut off
    assert low.max() > 0


_CODE = """
import numpy as np

calls = []

def oldest(iterates):
    calls.append([[array.copy() for array in one] for one in iterates])
    return iterates[0]

def median(iterates):
    return [np.median(np.stack(a), 0) for a in zip(*iterates)]

def raises(iterates):
    raise ValueError("three iterates\\n are too few")

def fewer(iterates):
    return iterates[0][:1]

def reshaped(iterates):
    return [a[np.newaxis] for a in iterates[0]]

def infinite(iterates):
    return [a + np.inf for a in iterates[0]]

def complex_numbers(iterates):
    return [a + 1j for a in iterates[0]]

def random(iterates):
    return [a + np.random.normal(size=a.shape) for a in iterates[0]]

def counts(iterates, state=[0]):
    state[0] += 1
    return [a * state[0] for a in iterates[0]]

def remembers(iterates, state=[0.0]):
    before, state[0] = state[0], iterates[0][0].sum()
    return [a + before for a in iterates[0]]

def changes(iterates):
    iterates[0][0] += 1
    return iterates[0]
"""

_names = itertools.count()


@pytest.fixture
def named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """``named(function)``: the spec of a function of a new module."""
    module = f"aggregates_of_ones_own_{next(_names)}"
    (tmp_path / f"{module}.py").write_text(_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda function: f"{module}:{function}"


def _weights() -> list[Any]:
    return [tf.Variable(tf.zeros((2, 2))), tf.Variable(0.0)]


def test_it_gets_the_last_iterates_oldest_first_and_the_initial_weights_first(
    named: Callable[[str], str],
) -> None:
    weights = _weights()
    spec = named("median")
    settings = AggregationSettings(tail=3, aggregate=spec, train_over="custom")
    averages = TrainingAverages(weights, settings)
    scalars = [0.0]
    for step, value in enumerate((4.0, 8.0, 1.0, 2.0, 16.0), 1):
        weights[1].assign(value)
        scalars.append(value)
        averages.after_step(step)
        iterates = averages["uta"].iterates()  # type: ignore[attr-defined]
        assert [float(one[1]) for one in iterates] == scalars[-3:]
        assert float(averages["custom"].values()[1]) == np.median(scalars[-3:])
    averages.before_step(5)
    assert float(weights[1]) == 2.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", r"ValueError: three iterates are too few .*py, line"),
        ("fewer", r"an iterate, 2: \(2, 2\), \(\); it returned 1: \(2, 2\)"),
        ("reshaped", "shapes of an iterate"),
        ("infinite", "finite numbers"),
        ("complex_numbers", "raised UFuncTypeError|raised TypeError|same_kind"),
        ("random", "varies between two calls"),
        ("counts", "varies between two calls"),
        ("remembers", "varies between two calls"),
        ("changes", "read-only"),
        ("nothing", "to name a function"),
    ],
)
def test_a_function_that_does_not_work_or_varies_is_refused_before_the_first_step(
    function: str, message: str, named: Callable[[str], str]
) -> None:
    settings = AggregationSettings(tail=3, aggregate=named(function))
    with pytest.raises(InputError, match=message) as error:
        load_aggregate(settings, _weights())
    assert "\n" not in str(error.value)


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


def test_the_file_has_a_row_per_example(tmp_path: pathlib.Path) -> None:
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
    told = {
        name: values * 50.0 if name == "stddev" else 100.0 + values * 50.0
        for name, values in columns.items()
    }
    target = Target(name="y", range=(50.0, 150.0))
    wide = write_uncertainty(path, outputs, steps=(6, 8, 10), level=0.9, target=target)
    assert wide["mean_width"] == pytest.approx(50 * summary["mean_width"])
    table = pq.read_table(path)
    for name, values in told.items():
        np.testing.assert_allclose(np.array(table[name]), values)
