"""Each guarantee of pipelines.core.choices, and a fault that its test must catch.

A guarantee is checked by a function that returns a p-value, exact or conservative, and
divided among the tests it makes (Bonferroni).  The sampler must stay above ERROR_RATE,
the chance that a correct sampler would fail for a fresh key; every planted fault must
fall below it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accounting.core.plan import DpSgdPlan, check_epochs, steps_per_epoch
from accounting.core.validation import InputError
from pipelines.core import choices
from pipelines.core.choices import (
    BlockSpan,
    Choices,
    PlanSampler,
    arrange_steps,
    make_sampler,
)
from pipelines.core.keys import Stream
from pipelines.files.key_sources import insecure_key
from tests.pipelines.core.test_streams import FakeStream

ERROR_RATE = 1e-6
ROWS, STEPS, KEYS = 60, 20, 1000


def poisson_plan(num_examples: int, batch: int, num_steps: int) -> DpSgdPlan:
    sizes = {"num_examples": num_examples, "expected_batch_size": batch}
    return DpSgdPlan(sampler="poisson", num_steps=num_steps, **sizes)


PLAN = poisson_plan(2 * ROWS, 24, STEPS)
Q = float(PLAN.sampling_probability)


def choose(plan: DpSgdPlan, key: bytes, name: str, rows: int) -> Choices:
    """Of a block that is the whole data set, unless the sampler does not care."""
    block = BlockSpan(label=name, num_rows=rows, first_row=0)
    return make_sampler(plan, key, [block]).choose(block)


def indicator(plan: DpSgdPlan, key: bytes, block: str, rows: int = ROWS) -> np.ndarray:
    """The 0/1 matrix (row, step) of one block."""
    row, step, _ = choose(plan, key, block, rows)
    matrix = np.zeros((rows, plan.num_steps), np.int64)
    np.add.at(matrix, (row, step), 1)
    assert matrix.max(initial=0) <= 1, "a row chose a step twice"
    return matrix


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    """0/1 array (key, row, step): two blocks of ROWS rows under KEYS keys."""
    return np.stack(
        [
            np.vstack([indicator(PLAN, insecure_key(k), name) for name in ("a", "b")])
            for k in range(KEYS)
        ]
    )


def smallest_p(counts: np.ndarray, trials: int, probability: float) -> float:
    """Bonferroni-corrected two-sided binomial p-value of the most extreme count."""
    below = stats.binom.cdf(counts, trials, probability)
    above = stats.binom.sf(counts - 1, trials, probability)
    return min(1.0, float(2 * counts.size * np.minimum(below, above).min()))


def p_inclusion(x: np.ndarray) -> float:
    by_row = smallest_p(x.sum(axis=(0, 2)), x.shape[0] * x.shape[2], Q)
    by_step = smallest_p(x.sum(axis=(0, 1)), x.shape[0] * x.shape[1], Q)
    return 2 * min(by_row, by_step)


def p_pairs(flat: np.ndarray) -> float:
    """Joint counts of all pairs of columns against Binomial(trials, q^2)."""
    joint = (flat.T @ flat)[np.triu_indices(flat.shape[1], k=1)]
    return smallest_p(joint, len(flat), Q * Q)


def p_steps_independent(x: np.ndarray) -> float:
    return p_pairs(x.reshape(-1, x.shape[2]).astype(float))


def p_rows_independent(x: np.ndarray) -> float:
    return p_pairs(x.transpose(0, 2, 1).reshape(-1, x.shape[1]).astype(float))


def p_batch_size(x: np.ndarray) -> float:
    """Chi-square of the batch sizes against the exact binomial law."""
    sizes = x.sum(axis=1).ravel()
    support = np.arange(x.shape[1] + 1)
    expected = stats.binom.pmf(support, x.shape[1], Q) * len(sizes)
    observed = np.bincount(sizes, minlength=len(support))
    # Sizes expected fewer than 20 times share one cell at either end.
    low, high = np.flatnonzero(expected >= 20)[[0, -1]]
    starts = [0, *range(low + 1, high + 1)]
    return stats.chisquare(
        np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)
    ).pvalue


def faults_of(drawn: np.ndarray) -> dict[str, np.ndarray]:
    """What a faulty sampler would draw."""
    generator = np.random.default_rng(0)
    ranks = generator.random(drawn.shape).argsort(axis=2)
    found = {
        "halved": drawn * (generator.random(drawn.shape) < 0.5),
        # 5 % off in every cell: 2.4M trials put this 17 standard deviations away.
        "shaved": drawn * (generator.random(drawn.shape) < 0.95),
        # Every row exactly Q * STEPS times; every batch of one size.
        "shuffled": (ranks < Q * STEPS).astype(int),
        "fixed size": (
            generator.random(drawn.shape).argsort(axis=1) < Q * 2 * ROWS
        ).astype(int),
    }
    others = ("no step", "no row", "repeated", "same stream", "duplicate")
    found |= {name: drawn.copy() for name in others}
    found["no step"][:, :, -1] = 0
    found["no row"][:, 7, :] = 0
    found["repeated"][:, :, 1] = drawn[:, :, 0]  # two steps are the same batch
    # The block's name is not part of its key.
    found["same stream"][:, ROWS:, :] = drawn[:, :ROWS, :]
    found["duplicate"][:, 1, :] = drawn[:, 0, :]
    return found


@pytest.mark.parametrize(
    ("guarantee", "faults"),
    [
        (p_inclusion, ("halved", "shaved", "no step", "no row")),
        (p_steps_independent, ("repeated", "shuffled")),
        (p_rows_independent, ("same stream", "duplicate")),
        (p_batch_size, ("fixed size", "shaved")),
    ],
)
def test_a_guarantee_holds_and_its_test_catches_faults(
    drawn: np.ndarray, guarantee: Callable[[np.ndarray], float], faults: tuple[str, ...]
) -> None:
    assert guarantee(drawn) > ERROR_RATE
    wrong = faults_of(drawn)
    for name in faults:
        assert guarantee(wrong[name]) < ERROR_RATE, name


def p_uniform_subset(by_arrival: bool) -> float:
    """Chi-square of which 3 of 6 rows survive, over steps, in arrival order."""
    trials, rows, cap = 20_000, 6, 3
    step = np.tile(np.arange(trials), rows)
    stream = Stream(insecure_key(1))
    priority = (
        np.arange(trials * rows, dtype=np.uint64)
        if by_arrival
        else stream.words(trials * rows)
    )
    kept = arrange_steps(step, priority, range(trials), cap)
    subsets = {s: i for i, s in enumerate(itertools.combinations(range(rows), cap))}
    counts = np.zeros(len(subsets))
    for chosen in kept:
        counts[subsets[tuple(sorted(chosen // trials))]] += 1
    return stats.chisquare(counts).pvalue


def test_uniform_truncation_is_not_first_come_first_kept() -> None:
    assert p_uniform_subset(by_arrival=False) > ERROR_RATE
    assert p_uniform_subset(by_arrival=True) < ERROR_RATE


def test_uniform_truncation_does_not_depend_on_arrival() -> None:
    stream = Stream(insecure_key(2))
    step, priority = stream.integers(10, 500), stream.words(500)
    shuffle = np.random.default_rng(0).permutation(500)
    one = arrange_steps(step, priority, range(10), 20)
    other = arrange_steps(step[shuffle], priority[shuffle], range(10), 20)
    for first, second in zip(one, other, strict=True):
        assert (priority[first] == priority[shuffle][second]).all()
        assert len(first) == 20


def test_arrange_steps_by_hand() -> None:
    step = np.array([5, 3, 5, 5])
    priority = np.array([9, 1, 2, 7], np.uint64)
    kept = arrange_steps(step, priority, range(3, 7), 2)
    assert [k.tolist() for k in kept] == [[1], [], [2, 3], []]
    kept = arrange_steps(step, priority, range(3, 7), None)
    assert [k.tolist() for k in kept] == [[1], [], [2, 3, 0], []]


def test_determinism_golden_values() -> None:
    """Recipe: the first participations for seed 0, block "golden#0", 5 rows of PLAN.

    They change only with PLAN's fingerprint or the sampler, and then batches that were
    made before cannot be made again: raise FORMAT_VERSION and say so in the changelog.
    """
    row, step, priority = choose(PLAN, insecure_key(0), "golden#0", 5)
    assert row.tolist() == GOLDEN_ROWS
    assert step.tolist() == GOLDEN_STEPS
    assert [hex(p) for p in priority[:2]] == GOLDEN_PRIORITIES


GOLDEN_ROWS = [0] * 6 + [1] * 5 + [2] * 5 + [3] * 4 + [4] * 3
GOLDEN_STEPS = [
    *(1, 8, 12, 14, 16, 19), *(2, 4, 8, 11, 19), *(3, 6, 11, 14, 15),
    *(4, 5, 14, 15), *(0, 13, 16),
]  # fmt: skip
GOLDEN_PRIORITIES = ["0xf9d100ebcfcc5695", "0x2454b9fa67ca489a"]


def test_separation() -> None:
    def draw(plan: DpSgdPlan = PLAN, seed: int = 0, block: str = "x#0") -> bytes:
        return indicator(plan, insecure_key(seed), block).tobytes()

    other_plan = dataclasses.replace(PLAN, num_epochs=2)
    draws = {draw(), draw(seed=1), draw(block="x#1"), draw(other_plan)}
    assert len(draws) == 4


@pytest.mark.parametrize(
    ("trials", "probability"), [(1, Fraction(1, 3)), (40, Fraction(7, 10))]
)
def test_the_law_of_counts_is_the_exact_binomial(
    trials: int, probability: Fraction
) -> None:
    def at_most(k: int) -> Fraction:
        terms = (
            math.comb(trials, i) * probability**i * (1 - probability) ** (trials - i)
            for i in range(k + 1)
        )
        return sum(terms, Fraction())

    table = choices.binomial_table(trials, probability)
    assert table == [math.floor(2**128 * at_most(k)) for k in range(trials)]


def test_a_table_ends_where_nothing_is_left_to_draw() -> None:
    table = choices.binomial_table(100_000, Fraction(1, 100_000))
    assert table[-1] == 2**128 - 1
    assert len(table) < 40


def test_the_lower_words_of_equal_upper_ones_decide() -> None:
    big = 2**63 + 1  # no float holds it
    starts = (np.array([5, big, big, big + 2], "u8"), np.array([9, 3, 7, 0], "u8"))
    high = np.array([4, 5, 5, big, big, big, big, big + 1, big + 2], "u8")
    low = np.array([9, 8, 9, 2, 3, 6, 7, 0, 0], "u8")
    reached = choices._reached(starts, high, low)
    assert reached.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_the_lower_word_decides_a_tied_count() -> None:
    probability = Fraction(1, 3)
    [entry] = choices.binomial_table(1, probability)
    high, low = divmod(entry, 2**64)
    words: list[int] = [high, high - 1, high, high + 1, low - 1, low]
    counts = choices._binomial(FakeStream([*words]), 1, probability, 4)
    assert counts.tolist() == [0, 0, 1, 1]


@settings(deadline=None, max_examples=50)
@given(num_steps=st.integers(1, 30), counts=st.lists(st.integers(0, 30), max_size=20))
def test_subsets_have_the_asked_for_sizes(num_steps: int, counts: list[int]) -> None:
    sizes = np.minimum(np.array(counts, np.int64), num_steps)
    row, step = choices._subsets(Stream(insecure_key(0)), sizes, num_steps)
    assert (np.bincount(row, minlength=len(sizes)) == sizes).all()
    assert len({*zip(row.tolist(), step.tolist(), strict=True)}) == len(row)
    assert ((step >= 0) & (step < num_steps)).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_subsets_are_uniform(size: int) -> None:
    rows, num_steps = 20_000, 5
    sizes = np.full(rows, size)
    row, step = choices._subsets(Stream(insecure_key(size)), sizes, num_steps)
    masks = np.bincount(row, weights=2.0**step, minlength=rows).astype(int)
    _, counts = np.unique(masks, return_counts=True)
    assert len(counts) == math.comb(num_steps, size)
    assert stats.chisquare(counts).pvalue > ERROR_RATE


def test_degenerate_plans() -> None:
    key = insecure_key(0)
    everyone = poisson_plan(4, 4, 3)
    assert indicator(everyone, key, "a", 4).all()
    assert len(choose(everyone, key, "a", 0)[0]) == 0
    one_step = poisson_plan(4, 1, 1)
    assert set(choose(one_step, key, "a", 4)[1].tolist()) <= {0}
    rare = poisson_plan(10**9, 1, 1)
    assert len(choose(rare, key, "a", 1000)[0]) == 0
    empty_groups = cyclic_plan(bands=16, num_examples=200, expected_batch_size=11)
    assert set(choose(empty_groups, key, "a", 200)[1].tolist()) == {*range(11)}


def test_heavy_rates_obey_the_law() -> None:
    """q = 5/6, where most rows take the complement's path."""
    plan = poisson_plan(6, 5, 12)
    counts = indicator(plan, insecure_key(0), "a", 20_000)
    assert smallest_p(counts.sum(axis=0), 20_000, 5 / 6) > ERROR_RATE
    sizes = np.bincount(counts.sum(axis=1), minlength=13)[6:]
    law = stats.binom.pmf(np.arange(13), 12, 5 / 6)
    expected = 20_000 * np.append(law[:7].sum(), law[7:])
    sizes[0] += 20_000 - sizes.sum()
    assert stats.chisquare(sizes, expected).pvalue > ERROR_RATE


ONCE = ("deterministic", "persistent-shuffle", "dynamic-shuffle", "balls-and-bins")


def plan_of(
    sampler: str, num_examples: int = 50, batch: int = 7, epochs: int = 3
) -> DpSgdPlan:
    steps = steps_per_epoch(num_examples, batch)
    return DpSgdPlan(
        sampler=sampler, num_examples=num_examples, expected_batch_size=batch,
        num_steps=epochs * steps, num_epochs=epochs,
    )  # fmt: skip


@pytest.mark.parametrize("sampler", ONCE)
def test_once_per_epoch(sampler: str) -> None:
    plan = plan_of(sampler)
    matrix = indicator(plan, insecure_key(0), "a", 50).reshape(50, 3, 7)
    assert (matrix.sum(axis=2) == 1).all()
    if sampler != "balls-and-bins":
        assert set(matrix.sum(axis=0).ravel()) == {7, 8}
        assert matrix.sum(axis=0).max() == plan.largest_batch_size


def test_deterministic_batches_follow_the_data_over_blocks() -> None:
    plan = plan_of("deterministic")
    steps = []
    for first_row, num_rows in ((0, 20), (20, 0), (20, 30)):
        block = BlockSpan(label="x", num_rows=num_rows, first_row=first_row)
        _, step, priority = make_sampler(plan, insecure_key(0), [block]).choose(block)
        assert (np.diff(priority.reshape(3, -1).astype(int)) == 1).all()
        steps.append(step.reshape(3, num_rows))
    together = np.concatenate(steps, axis=1)
    assert (np.diff(together, axis=1) >= 0).all()
    assert together[:, 0].tolist() == [0, 7, 14]
    assert together[:, -1].tolist() == [6, 13, 20]


def test_balls_and_bins_are_uniform_and_drawn_anew_each_epoch() -> None:
    plan = plan_of("balls-and-bins", num_examples=28_000, batch=4000)
    step = choose(plan, insecure_key(0), "a", 28_000)[1].reshape(3, -1)
    pairs = np.zeros((7, 7), int)
    np.add.at(pairs, (step[0], step[1] - 7), 1)
    # 49 equally likely pairs: uniform bins, and independent epochs.
    assert stats.chisquare(pairs.ravel()).pvalue > ERROR_RATE
    same = np.diag(np.bincount(step[0]))  # the fault: one assignment for all epochs
    assert stats.chisquare(same.ravel()).pvalue < ERROR_RATE


def cyclic_plan(**changes: object) -> DpSgdPlan:
    """Three groups with 4, 4 and 3 steps, in each of them with probability 0.3."""
    fields = {
        "sampler": "cyclic-poisson", "num_examples": 40_000, "bands": 3,
        "expected_batch_size": 4_000, "num_steps": 11, **changes,
    }  # fmt: skip
    return DpSgdPlan(**fields)  # type: ignore[arg-type]


def p_groups(matrix: np.ndarray) -> float:
    """Of the law of the four steps of group 0: all patterns, and of each step."""
    rows, _ = matrix.shape
    took, rest = matrix[:, ::3], np.delete(matrix, np.s_[::3], axis=1)
    alone = np.where(rest.any(axis=1), 0, took @ [1, 2, 4, 8])
    found = np.bincount(alone, minlength=16)[1:]
    sizes = np.array([bin(each).count("1") for each in range(1, 16)])
    law = 0.3**sizes * 0.7 ** (4 - sizes) / 3
    expected = rows * np.append(law, 1 - law.sum())
    patterns = stats.chisquare(np.append(found, rows - found.sum()), expected).pvalue
    return 2 * min(patterns, smallest_p(matrix.sum(axis=0), rows, 0.1))


def test_cyclic_rows_are_in_steps_of_one_uniform_group_alone() -> None:
    plan = cyclic_plan()
    first, second = (indicator(plan, insecure_key(0), name, 40_000) for name in "ab")
    for matrix in (first, second):
        groups = np.stack([matrix[:, g::3].any(axis=1) for g in range(3)])
        assert (groups.sum(axis=0) <= 1).all()
        assert p_groups(matrix) > ERROR_RATE
    # Groups of two blocks are independent, which groups by position would not be.
    seen = [
        np.argmax([m[:, g::3].any(1) for g in range(3)], 0) for m in (first, second)
    ]
    both = first.any(axis=1) & second.any(axis=1)
    pairs = np.zeros((3, 3), int)
    np.add.at(pairs, (seen[0][both], seen[1][both]), 1)
    assert stats.chi2_contingency(pairs).pvalue > ERROR_RATE
    same = np.diag(pairs.sum(axis=0)) + 1  # the fault
    assert stats.chi2_contingency(same).pvalue < ERROR_RATE
    # Another: rows that are in the steps of every group.
    plain = cyclic_plan(sampler="poisson", bands=None)
    assert p_groups(indicator(plain, insecure_key(0), "a", 40_000)) < ERROR_RATE


@pytest.mark.parametrize("sampler", ONCE)
def test_steps_that_do_not_make_epochs_are_refused(sampler: str) -> None:
    plan = plan_of(sampler)
    check_epochs(plan)
    with pytest.raises(InputError, match="steps_per_epoch=6 to be 7"):
        check_epochs(dataclasses.replace(plan, num_steps=18))


def all_steps(plan: DpSgdPlan, seed: int, sizes: list[int]) -> np.ndarray:
    """The step of every row in every epoch, shape (epochs, rows)."""
    blocks = blocks_of(sizes)
    sampler = make_sampler(plan, insecure_key(seed), blocks)
    parts = [sampler.choose(block)[1] for block in blocks]
    return np.concatenate([part.reshape(plan.num_epochs, -1) for part in parts], axis=1)


def blocks_of(sizes: list[int]) -> list[BlockSpan]:
    firsts = np.cumsum([0, *sizes]).tolist()
    return [
        BlockSpan(label=f"b#{i}", num_rows=size, first_row=firsts[i])
        for i, size in enumerate(sizes)
    ]


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
    plan = plan_of(name, total, max(1, round(share * total)), epochs=2)
    found = all_steps(plan, seed, sizes)
    per_epoch = plan.steps_per_epoch
    for epoch in range(plan.num_epochs):
        sampler = PlanSampler(plan=plan, key=insecure_key(seed))
        shuffle = epoch % plan.num_shuffles
        ranks = [sampler.ranks(block, shuffle)[0] for block in blocks_of(sizes)]
        position = np.concatenate(ranks).argsort(kind="stable").argsort()
        expected = position * per_epoch // total + epoch * per_epoch
        assert (found[epoch] == expected).all()


def test_a_persistent_shuffle_keeps_its_order_and_a_dynamic_one_does_not() -> None:
    for name, equal in (("persistent-shuffle", True), ("dynamic-shuffle", False)):
        plan = plan_of(name, 500, 50, epochs=2)
        one, two = all_steps(plan, 3, [500])
        assert (one == two - plan.steps_per_epoch).all() == equal


def test_uniform_permutation() -> None:
    """The order of 4 rows in 2 blocks, under 600 keys: all 4! are equally likely."""
    plan = plan_of("dynamic-shuffle", 4, 1, epochs=1)
    orders = [tuple(all_steps(plan, seed, [1, 3])[0].tolist()) for seed in range(600)]

    def p_uniform(orders: list[tuple[int, ...]]) -> float:
        counts = collections.Counter(orders)
        assert len(counts) == math.factorial(4)
        return stats.chisquare(list(counts.values())).pvalue

    assert p_uniform(orders) > ERROR_RATE
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

    monkeypatch.setattr(PlanSampler, "rank_stream", lambda *_: Equal())
    plan = plan_of("dynamic-shuffle", 90, 10, epochs=1)
    assert (all_steps(plan, 0, [90])[0] == low.astype(int) // 10).all()


def test_steps_do_not_depend_on_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("dynamic-shuffle", 5000, 30, epochs=2)
    one = all_steps(plan, 5, [2000, 3000])
    monkeypatch.setattr(choices, "_MOST_BITS", 2)
    assert (all_steps(plan, 5, [2000, 3000]) == one).all()


def test_one_step_per_epoch_has_no_boundary() -> None:
    plan = plan_of("dynamic-shuffle", 10, 10, epochs=2)
    assert all_steps(plan, 0, [10]).tolist() == [[0] * 10, [1] * 10]
