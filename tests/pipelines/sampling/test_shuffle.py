"""Guarantees of pipelines.sampling.shuffle, against sorting all in memory."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accounting.core.plan import DpSgdPlan, steps_per_epoch
from pipelines.files.key_sources import insecure_key
from pipelines.sampling import shuffle
from pipelines.sampling.shuffle import draw_ranks, find_boundaries, shuffled_steps

ERROR_RATE = 1e-6


def plan_of(sampler: str, num_examples: int, batch: int, epochs: int = 2) -> DpSgdPlan:
    steps = steps_per_epoch(num_examples, batch)
    return DpSgdPlan(
        sampler=sampler, num_examples=num_examples, expected_batch_size=batch,
        num_steps=epochs * steps, num_epochs=epochs,
    )  # fmt: skip


def all_steps(plan: DpSgdPlan, seed: int, sizes: list[int]) -> np.ndarray:
    """The step of every row in every epoch, shape (epochs, rows)."""
    blocks = [(f"b#{i}", size) for i, size in enumerate(sizes)]
    boundaries = find_boundaries(plan, insecure_key(seed), blocks)
    parts = [
        shuffled_steps(plan, insecure_key(seed), name, size, boundaries)[1]
        for name, size in blocks
    ]
    shaped = [part.reshape(plan.num_epochs, -1) for part in parts]
    return np.concatenate(shaped, axis=1)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=5),
    share=st.floats(0, 1),
    persistent=st.booleans(),
    seed=st.integers(0, 100),
)
def test_exact_split(
    sizes: list[int], share: float, persistent: bool, seed: int
) -> None:
    """Against an argsort of all ranks: the in-memory permutation it replaces."""
    sizes = [*sizes, 1]
    total = sum(sizes)
    name = "persistent-shuffle" if persistent else "dynamic-shuffle"
    plan = plan_of(name, total, max(1, round(share * total)))
    found = all_steps(plan, seed, sizes)
    per_epoch = plan.steps_per_epoch
    for epoch in range(plan.num_epochs):
        ranks = [
            draw_ranks(plan, insecure_key(seed), epoch, f"b#{i}", size)[0]
            for i, size in enumerate(sizes)
        ]
        position = np.concatenate(ranks).argsort(kind="stable").argsort()
        expected = position * per_epoch // total + epoch * per_epoch
        assert (found[epoch] == expected).all()


def test_every_example_is_in_exactly_one_step_of_equal_size() -> None:
    plan = plan_of("dynamic-shuffle", 100_003, 1000)
    for epoch, steps in enumerate(all_steps(plan, 1, [60_000, 40_003])):
        sizes = np.bincount(steps - epoch * plan.steps_per_epoch)
        assert len(sizes) == 100
        assert set(sizes) == {1000, 1001}


def test_a_persistent_shuffle_keeps_its_order_and_a_dynamic_one_does_not() -> None:
    for name, equal in (("persistent-shuffle", True), ("dynamic-shuffle", False)):
        plan = plan_of(name, 500, 50)
        one, two = all_steps(plan, 3, [500])
        assert (one == two - plan.steps_per_epoch).all() == equal


@pytest.fixture(scope="module")
def orders() -> list[tuple[int, ...]]:
    """The order of 4 rows in 2 blocks under each of 2,000 keys."""
    plan = plan_of("dynamic-shuffle", 4, 1, epochs=1)
    return [tuple(all_steps(plan, seed, [1, 3])[0].tolist()) for seed in range(2_000)]


def p_uniform(orders: list[tuple[int, ...]]) -> float:
    """Chi-square of the orders against all 4! being equally likely."""
    counts = collections.Counter(orders)
    assert len(counts) == math.factorial(4)
    return stats.chisquare(list(counts.values())).pvalue


def test_uniform_permutation(orders: list[tuple[int, ...]]) -> None:
    assert p_uniform(orders) > ERROR_RATE


def test_uniform_permutation_catches_runs_that_are_not_shuffled(
    orders: list[tuple[int, ...]],
) -> None:
    faulty = [(0, 1, 2, 3) if k % 4 == 0 else order for k, order in enumerate(orders)]
    assert p_uniform(faulty) < ERROR_RATE


def test_equal_high_words_are_decided_by_the_low_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that share their high words, as 1 in 10^4 runs of 46M rows have."""
    low = np.random.default_rng(0).permutation(90).astype(np.uint64)

    class Equal:
        def __init__(self) -> None:
            parts = iter([np.full(90, 7, np.uint64), low])
            self.words = lambda count: next(parts)

    monkeypatch.setattr(shuffle, "_rank_stream", lambda *_: Equal())
    plan = plan_of("dynamic-shuffle", 90, 10, epochs=1)
    assert (all_steps(plan, 0, [90])[0] == low.astype(int) // 10).all()


def test_steps_do_not_depend_on_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("dynamic-shuffle", 5000, 30)
    one = all_steps(plan, 5, [2000, 3000])
    monkeypatch.setattr(shuffle, "_MOST_BUCKET_BITS", 2)
    assert (all_steps(plan, 5, [2000, 3000]) == one).all()


def test_one_step_per_epoch_has_no_boundary() -> None:
    plan = plan_of("dynamic-shuffle", 10, 10)
    assert all_steps(plan, 0, [10]).tolist() == [[0] * 10, [1] * 10]
