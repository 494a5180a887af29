"""Crossovers: proven where an upper bound passes below a lower one, and only there."""

from __future__ import annotations

import dataclasses

import pytest

from accounting.core.intervals import Bounds
from accounting.planning import crossovers, sweeps
from accounting.planning.comparison import EPSILON, Answer, Question
from accounting.planning.sweeps import Point, Sweep, SweepLine
from tests.accounting.plans import make_plan

PLAN = make_plan("poisson", 1000, 10, 100)
QUESTION = Question(
    num_examples=1000,
    expected_batch_size=10,
    num_steps=100,
    num_epochs=1,
    delta=1e-5,
    noise_multiplier=1.0,
)

Ends = tuple[float | None, float | None]


def _sweep(*lines: list[Ends]) -> Sweep:
    """A sweep over epochs with lines of (lower, upper) bounds, named a, b, ..."""
    return Sweep(
        question=QUESTION,
        axis="epochs",
        values=tuple(float(place + 1) for place in range(len(lines[0]))),
        lines=tuple(
            SweepLine(sampler=name) for name, _ in zip("abc", lines, strict=False)
        ),
        points=tuple(
            tuple(
                Point(
                    question=QUESTION,
                    answer=Answer(
                        plan=PLAN,
                        asked=EPSILON,
                        bounds=Bounds(lower=low, upper=high, method="m"),
                    ),
                )
                for low, high in line
            )
            for line in lines
        ),
    )


def test_opposite_proven_orders_are_a_proven_crossover() -> None:
    first: list[Ends] = [(1, 2), (2, 4), (5, 6)]
    second: list[Ends] = [(3, 4), (3, 5), (4, 4.5)]
    [found] = crossovers.find(_sweep(first, second))
    assert found.to_json() == {
        "lower": "a", "upper": "b", "start": 1.0, "end": 3.0, "proven": True,
    }  # fmt: skip
    [swapped] = crossovers.find(_sweep(second, first))
    assert (swapped.lower, swapped.upper) == ("b", "a")  # by place
    assert swapped.proven


def test_a_lower_bound_that_passes_below_an_upper_one_proves_no_crossover() -> None:
    first: list[Ends] = [(1, 2), (1, 2), (1, 2)]
    second: list[Ends] = [(3, 4), (1.5, 4), (1.5, 1.8)]
    [found] = crossovers.find(_sweep(first, second))
    assert (found.start, found.end, found.proven) == (2.0, 3.0, False)
    [group] = crossovers.grouped([found])
    assert group.sentence("epochs") == (
        "Order not proven from epochs=2 to 3: of a and b."
    )


@pytest.mark.parametrize(
    "second",
    [
        [(3, 4), (5, 6)],  # one order
        [(1.5, 4), (1.5, 6)],  # no order at all
        [(3, 4), (1, 2)],  # equal
        [(None, 4), (None, 6)],
        [(3, None), (3, None)],
    ],
)
def test_what_does_not_flip_is_not_mentioned(second: list[Ends]) -> None:
    assert not crossovers.find(_sweep([(1, 2), (1, 2)], second))


def test_a_lower_bound_is_computed_where_only_an_upper_one_is_at_hand() -> None:
    question = Question(
        num_examples=1000,
        expected_batch_size=250,
        num_steps=4,
        num_epochs=1,
        delta=1e-3,
        epsilon=1.0,
    )
    lines = (SweepLine(sampler="poisson"), SweepLine(sampler="deterministic"))
    swept = sweeps.sweep(question, "epsilon", lines, values=(1.0, 8.0))
    [found] = crossovers.find(swept)
    assert (found.lower, found.proven) == ("poisson", True)
    # The same of epsilon, and of delta.
    noise = dataclasses.replace(question, epsilon=None, noise_multiplier=0.6)
    swept = sweeps.sweep(noise, "noise-multiplier", lines, values=(0.5, 3.0))
    [found] = crossovers.find(swept)
    assert (found.lower, found.proven) == ("deterministic", True)
    swept = sweeps.sweep(noise, "epsilon", lines, values=(1.0, 8.0))
    [found] = crossovers.find(swept)
    assert (found.lower, found.proven) == ("poisson", True)


@pytest.mark.parametrize(
    ("lower", "decides"), [(9e-6, False), (1.1e-5, True), (None, False)]
)
def test_only_a_lower_bound_above_delta_decides(
    lower: float | None, decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = Bounds(upper=0.5, lower=lower, method="m")
    monkeypatch.setattr(crossovers.accountant, "delta", lambda *_, **__: bounds)
    swept = _sweep([(None, 1), (None, 3)], [(None, 2), (None, 2)])
    assert bool(crossovers.find(swept)) == decides


def test_pairs_that_say_the_same_are_named_together() -> None:
    first: list[Ends] = [(1, 1), (3, 3)]
    second: list[Ends] = [(2, 2), (2, 2)]
    [group] = crossovers.grouped(crossovers.find(_sweep(first, second, second)))
    assert group.sentence("epochs") == (
        "Proven crossover between epochs=1 and 2: of a, which come first, with b, c."
    )
