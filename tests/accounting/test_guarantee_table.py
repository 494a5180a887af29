"""The table of what is proven says what the accountant says."""

import re

import pytest

from tests.accounting import guarantee_table as table

QUESTIONS = table.questions()


def test_every_sampler_relation_and_unit_has_a_line():
    assert len(table.written()) == len(QUESTIONS) == 4 * len(table.samplers())


def test_the_text_describes_the_plan_of_the_table():
    plan = table.plan("truncated-poisson")
    described = (
        f"n = {plan.num_examples:,}, b = {plan.expected_batch_size}, "
        f"T = {plan.num_steps}, E = {plan.num_epochs}, "
        f"B = {plan.truncated_batch_size}, s = {table.NOISE:g}"
    )
    assert described in table.FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("place", range(len(QUESTIONS)))
def test_a_line_is_what_the_accountant_answers(place):
    line = table.written()[place]
    *ours, elsewhere, _ = line.split("|")
    assert "|".join(ours) == table.row(*QUESTIONS[place]).rsplit("|", 2)[0]
    if table.REFUSED in line or not elsewhere.strip():
        return
    upper = float(re.findall(r"\d+\.\d{4}", ours[-1])[-1])
    if "simulated" in elsewhere:
        low, high = map(float, re.findall(r"\d\.\d+e-\d+", elsewhere))
        assert low <= table.DELTA <= high * 1.03
    else:
        # The truth, or for truncation a bound of their own, which may be larger.
        found = float(elsewhere.split(",")[0])
        assert upper <= found + 1e-3 * upper + 1e-4
        if "truncated" not in line:
            assert found <= upper + 1e-3 * upper + 1e-4
