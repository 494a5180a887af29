"""Guarantees of pipelines.core.choices."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from accounting.core.plan import SAMPLERS, DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core import choices
from pipelines.core.choices import BlockSpan, make_sampler
from pipelines.files.key_sources import insecure_key
from pipelines.sampling import samplers
from tests.accounting.samplers.test_registry import NAME
from tests.pipelines.core.test_streams import FakeStream
from tests.sampler_fields import needed

#: BlockSpan of blocks; some are empty, or hold a single row.
SIZES = (70, 0, 1, 29, 100)


def blocks() -> list[BlockSpan]:
    firsts = np.cumsum([0, *SIZES])
    return [
        BlockSpan(
            label=f"{number}.parquet#0", num_rows=size, first_row=int(firsts[number])
        )
        for number, size in enumerate(SIZES)
    ]


def plans() -> list[DpSgdPlan]:
    """Every sampler, with rows in few, in most and in all steps."""
    found = []
    for sampler in SAMPLERS:
        for batch_size, num_steps, num_epochs in (
            (10, 60, 3),
            (50, 12, 3),
            (200, 4, 4),
        ):
            if "cyclic" in sampler:  # in all steps of its group
                batch_size = min(batch_size, 100)
            cap = min(200, batch_size + 5)
            plan = DpSgdPlan(
                sampler=sampler, num_examples=200, expected_batch_size=batch_size,
                num_steps=num_steps, num_epochs=num_epochs, **needed(sampler, cap),
            )  # fmt: skip
            found.append(plan)
    for bands in (3, 16):  # groups with a step more, and without any
        found.append(
            DpSgdPlan(sampler="cyclic-poisson", num_examples=200, num_steps=11,
                      expected_batch_size=11, bands=bands)
        )  # fmt: skip
    for batch_size in (110, 190):
        found.append(
            DpSgdPlan(sampler="poisson", num_examples=200, num_steps=9,
                      expected_batch_size=batch_size)
        )  # fmt: skip
    return found


@pytest.mark.parametrize("plan", plans(), ids=lambda p: f"{p.sampler}-{p.num_steps}")
def test_the_same_choices(plan: DpSgdPlan) -> None:
    """As the job's samplers, whose laws ``tests/pipelines/sampling`` tests."""
    key = insecure_key(plan.num_steps)
    sampler = make_sampler(plan, key, blocks())
    known = [
        samplers.BlockRows(name=b.label, num_rows=b.num_rows, first_row=b.first_row)
        for b in blocks()
    ]
    boundaries = samplers.find_boundaries(plan, key, known)
    total = 0
    for mine, theirs in zip(blocks(), known, strict=True):
        expected = samplers.sample_block(plan, key, theirs, boundaries)
        row, step, priority = sampler.choose(mine)
        np.testing.assert_array_equal(row, expected.row)
        np.testing.assert_array_equal(step, expected.step)
        np.testing.assert_array_equal(priority, expected.priority)
        total += len(row)
    assert total > 0


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
    high, low = samplers.binomial_thresholds(100_000, Fraction(1, 100_000))
    known = [int(h) << 64 | int(w) for h, w in zip(high, low, strict=True)]
    assert table[: len(known)] == known[: len(table)]


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


def test_a_sampler_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(choices._SAMPLERS, "poisson")
    plan = DpSgdPlan(
        sampler="poisson", num_examples=200, expected_batch_size=2, num_steps=3
    )
    assert NAME not in choices._SAMPLERS
    with pytest.raises(InputError, match="no reference"):
        make_sampler(plan, insecure_key(0), blocks())
