"""Answers that may not change, a share of them; and that a change is found.

All of them: ``python -m tests.frozen``.
"""

from __future__ import annotations

import importlib

import pytest

from tests.frozen import compare, planted_faults, table_metrics
from tests.frozen.__main__ import KINDS

#: Every so many answers are compared here, of those that take minutes.
SHARES = {"batches": 1, "accountant": 50, "sums": 10}


@pytest.mark.parametrize("kind", SHARES)
def test_answers_are_the_frozen_ones(kind: str) -> None:
    before = compare.frozen(kind)
    names = sorted(before)[:: SHARES[kind]]
    module, same = KINDS[kind]
    assert same is not None
    found = importlib.import_module(f"tests.frozen.{module}").answer(names)
    assert not compare.changes({name: before[name] for name in names}, found, same)


def test_a_change_is_found() -> None:
    before = {"kept": [1.0, 2.0], "moved": [1.0], "refused": "refused", "gone": [1.0]}
    now = {"kept": [1.0, 2.0 + 1e-9], "moved": [1.01], "refused": [1.0], "new": [1.0]}
    lines = compare.changes(before, now, compare.within(1e-6))
    names = [line.split(":")[0] for line in lines]
    assert names == ["gone", "moved", "new", "refused"]


def test_means_differ_by_chance_only_within_their_spread() -> None:
    spread = 0.004
    # 5.5 standard deviations of the difference, 0.0025, are 0.014.
    assert table_metrics.same([0.80, spread], [0.81, spread])
    assert not table_metrics.same([0.80, spread], [0.82, spread])


@pytest.mark.parametrize("fault", planted_faults.every(), ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: planted_faults.Fault) -> None:
    source = (planted_faults.ROOT / fault.file).read_text(encoding="utf-8")
    compile(planted_faults.planted(fault, source), fault.file, "exec")
    for name in fault.tests:
        path, _, test = name.partition("::")
        assert (
            test in (planted_faults.ROOT / path).read_text("utf-8")
            if test
            else (planted_faults.ROOT / path).exists()
        )
