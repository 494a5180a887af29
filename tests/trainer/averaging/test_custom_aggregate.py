"""Users' aggregates: their arguments, and what is refused."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from trainer.averaging.averages import TrainingAverages
from trainer.averaging.iterates import load_aggregate
from trainer.core.tf_compat import tf
from trainer.settings.aggregation_settings import AggregationSettings

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
