"""The report of a comparison in numbers, words and pictures."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.experiments.conftest import PRIVATE
from trainer.experiments.compare import summarise
from trainer.experiments.comparison_runs import ComparisonCase
from trainer.settings.train_settings import TrainSettings


def _case(**changes: Any) -> ComparisonCase:
    settings = dataclasses.replace(PRIVATE, target_epsilon=None, noise_multiplier=0.9)
    fields: dict[str, Any] = {
        "batches": BatchSettings(expected_batch_size=20, num_epochs=1),
        "settings": settings, "target_epsilon": 3.0, "noise_rule": "same",
    }  # fmt: skip
    return ComparisonCase(**{**fields, **changes})


def _result(auc: float, *, ema: float | None = None, **privacy: Any) -> dict[str, Any]:
    aggregates = {} if ema is None else {"ema": {"auc": ema, "log_loss": None}}
    return {
        "metrics": {"auc": auc, "log_loss": 0.5, "aggregates": aggregates},
        "privacy": {
            "noise_multiplier": 0.9,
            "epsilon": 2.5,
            "epsilon_lower_bound": 2.0,
            **privacy,
        },
    }


def test_summarise_reports_every_case_with_mean_and_standard_deviation() -> None:
    plain = _case(
        settings=TrainSettings(method="non-private"), target_epsilon=None,
        noise_rule=None,
    )  # fmt: skip
    results = [
        (_case(), _result(0.7, ema=0.5)),
        (_case(), _result(0.8, ema=0.7, epsilon=2.75)),
        (plain, _result(0.9)),
    ]
    last, ema, without = summarise(results, metric="auc")
    assert (last.weights, ema.weights, without.weights) == ("last", "ema", "last")
    assert last.mean == pytest.approx(0.75)
    assert last.stddev == pytest.approx(np.sqrt(0.005))
    assert last.num_seeds == 2
    assert last.epsilon == 2.75  # the weakest of the statements
    assert ema.mean == pytest.approx(0.6)
    assert (without.epsilon, without.noise_multiplier, without.stddev) == (None,) * 3
    assert without.guarantee is None


@pytest.mark.parametrize(
    ("rule", "epsilon", "guarantee"),
    [
        ("same", 2.5, "proven"), ("same", 3.1, "no guarantee"),
        ("optimistic", 3.1, "no guarantee"), ("optimistic", 2.5, "no guarantee"),
        # Verified at the target, where a search for epsilon ends a little above.
        ("own", 3.0001, "proven"),
    ],
)  # fmt: skip
def test_a_target_is_called_proven_only_where_it_is(
    rule: str, epsilon: float, guarantee: str
) -> None:
    [found] = summarise(
        [(_case(noise_rule=rule), _result(0.7, epsilon=epsilon))], metric="auc"
    )
    assert found.guarantee == guarantee
    assert found.epsilon == (3.0 if rule == "own" else epsilon)


def test_an_unknown_metric_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(InputError, match=r"metric='f1'.*auc, log_loss"):
        summarise([(_case(), _result(0.7))], metric="f1")
