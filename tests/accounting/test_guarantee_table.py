"""The table of `accounting/README.md`: what is proven for whom, and how tightly.

    python -m tests.accounting.test_guarantee_table

writes it anew.  What others say is kept where the installed dp_accounting is not asked.
"""

from __future__ import annotations

import math
import pathlib
import re
from typing import Any

import pytest

from accounting import lower_bounds
from accounting.core import accountant, neighboring_relation
from accounting.core.intervals import Bounds
from accounting.core.neighboring_relation import NAMES, RELATIONS, REPLACE_SPECIAL
from accounting.core.plan import SAMPLERS, DpSgdPlan
from accounting.core.validation import InputError
from accounting.cross_check import second_opinion
from tests.sampler_fields import needed

FILE = pathlib.Path(__file__).parents[2] / "accounting" / "README.md"
NOISE, DELTA, USER = 1.0, 1e-5, 3
HEAD = (
    "| sampler | neighbours | unit | upper bound | lower bound | epsilon "
    "| elsewhere |\n"
    "|---|---|---|---|---|---|---|\n"
)
#: Every sampler with every relation and, under zero-out, both units.
UNITS: list[dict[str, Any]] = [
    *({"neighboring_relation": relation} for relation in RELATIONS),
    {"neighboring_relation": REPLACE_SPECIAL, "max_examples_per_user": USER},
]
QUESTIONS = [(sampler, unit) for sampler in SAMPLERS for unit in UNITS]


def plan(sampler: str) -> DpSgdPlan:
    """Returns the plan of the table."""
    return DpSgdPlan(
        sampler=sampler, num_examples=10_000, expected_batch_size=100, num_steps=200,
        num_epochs=2, **needed(sampler, cap=170, bands=4),
    )  # fmt: skip


def answer(sampler: str, unit: dict[str, Any]) -> Bounds | None:
    """Returns bounds on epsilon, from both sides where both are known."""
    try:
        neighboring_relation.brought(sampler, **unit)
    except InputError:
        return None
    question = {"noise_multiplier": NOISE, "delta": DELTA, **unit}
    try:
        return lower_bounds.epsilon(plan(sampler), **question)
    except InputError:
        return accountant.epsilon(plan(sampler), **question)


def row(sampler: str, unit: dict[str, Any], elsewhere: str = "") -> str:
    """Returns the line of one question."""
    who = "user" if "max_examples_per_user" in unit else "example"
    start = f"| {sampler} | {NAMES[unit['neighboring_relation']]} | {who} |"
    found = answer(sampler, unit)
    if found is None:
        return f"{start} refused | | | |"
    upper = math.ceil(found.guarantee * 1e4) / 1e4
    lower, below = "not known", ""
    if found.lower is not None:
        lower = found.lower_method or "the same"
        below = f"{math.floor(found.lower * 1e4) / 1e4:.4f} .. "
    return f"{start} {found.method} | {lower} | {below}{upper:.4f} | {elsewhere} |"


def written() -> list[str]:
    """Returns the lines of the table as they stand in the file."""
    body = FILE.read_text(encoding="utf-8").split(HEAD, 1)[1]
    return re.match(r"(\|.*\n)+", body).group().splitlines()  # type: ignore[union-attr]


def write() -> None:
    """Writes the table anew."""
    lines = []
    for (sampler, unit), before in zip(QUESTIONS, written(), strict=True):
        elsewhere = before.split("|")[-2].strip()
        try:
            found = second_opinion(
                plan(sampler), noise_multiplier=NOISE, delta=DELTA, **unit
            )
            elsewhere = f"{found.epsilon:.4f}, {found.source}"
        except InputError:
            pass
        lines.append(row(sampler, unit, elsewhere))
    before, after = FILE.read_text(encoding="utf-8").split(HEAD, 1)
    rest = re.sub(r"\A(\|.*\n)*", "", after)
    text = before + HEAD + "\n".join(lines) + "\n" + rest
    FILE.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("place", range(len(QUESTIONS)))
def test_a_line_is_what_the_accountant_answers(place: int) -> None:
    line = written()[place]
    *ours, elsewhere, _ = line.split("|")
    assert "|".join(ours) == row(*QUESTIONS[place]).rsplit("|", 2)[0]
    if not elsewhere.strip():
        return
    upper = float(re.findall(r"\d+\.\d{4}", ours[-1])[-1])
    # The truth, or for truncation a bound of their own, which may be larger.
    found = float(elsewhere.split(",")[0])
    assert upper <= found + 1e-3 * upper + 1e-4
    if "truncated" not in line:
        assert found <= upper + 1e-3 * upper + 1e-4


if __name__ == "__main__":
    write()
