"""Accepted averages and kept iterates, and which steps are kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.core.validation import InputError
from trainer.settings.aggregation_settings import AggregationSettings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ema_decay": 1.0}, "ema_decay=1"),
        ({"tail": 0}, "tail=0"),
        ({"train_over": "uta"}, "--tail"),
        ({"train_over": "ema", "tail": 3}, "--ema-decay"),
        ({"train_over": "upa", "tail": 3}, "train_over='upa'"),
        ({"aggregate_from": 3, "tail": 3}, "--train-over"),
        ({"aggregate_from": -1, "tail": 3, "train_over": "uta"}, "aggregate_from=-1"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_every": 3}, "--keep-last"),
        ({"keep_every": 0, "keep_last": 3}, "keep_every=0"),
        ({"keep_decay": 1.0}, "keep_decay=1"),
        ({"uncertainty": 0.95}, "--keep-last"),
        ({"uncertainty": 0.95, "keep_last": 1}, "keep_last=1"),
        ({"uncertainty": 1.0, "keep_last": 2}, "uncertainty=1"),
        ({"export": ("upa",)}, "--keep-last"),
        ({"export": ("opa",), "keep_last": 2}, "export='opa'"),
    ],
)
def test_impossible_requests_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        AggregationSettings(**fields)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_into_the_run_is_refused() -> None:
    settings = AggregationSettings(keep_last=5, keep_every=20)
    settings.check_steps(81)
    with pytest.raises(InputError, match="keep_last=5 iterates, 20 steps apart"):
        settings.check_steps(80)
    with pytest.raises(InputError, match="keep_last=5"):
        AggregationSettings(keep_last=5).check_steps(4)
    late = AggregationSettings(tail=2, train_over="uta", aggregate_from=10)
    late.check_steps(11)
    with pytest.raises(InputError, match="aggregate_from=10 <= 9"):
        late.check_steps(10)


@given(st.integers(1, 10_000), st.integers(1, 50), st.none() | st.integers(1, 100))
def test_kept_steps_are_evenly_apart_and_end_with_the_run(
    num_steps: int, keep_last: int, keep_every: int | None
) -> None:
    settings = AggregationSettings(keep_last=keep_last, keep_every=keep_every)
    try:
        steps = settings.kept_steps(num_steps)
    except InputError:
        assert (keep_last - 1) * (keep_every or 1) >= num_steps
        return
    assert len(steps) == keep_last
    assert steps[-1] == num_steps
    assert steps[0] >= 1
    gaps = {b - a for a, b in itertools.pairwise(steps)}
    assert len(gaps) <= 1
    if keep_every is not None:
        assert gaps <= {keep_every}
    elif num_steps >= 2 * keep_last:
        assert steps[0] > num_steps / 2
