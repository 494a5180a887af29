"""The table of `accounting/README.md`: what is proven for whom, and how tightly.

    python -m tests.accounting.guarantee_table

writes it anew.  It needs dp-accounting 0.6, for relations that older ones do not know;
with the argument ``ours`` it keeps what others say.
"""

from __future__ import annotations

import math
import pathlib
import re
import sys
from typing import Any

from accounting.core import accountant, neighboring_relation
from accounting.core.intervals import Bounds
from accounting.core.neighboring_relation import NAMES, RELATIONS, REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.sampler_registry import names as samplers
from accounting.core.validation import InputError
from accounting.lower_bounds import poisson_batches
from tests.accounting.cross_check import check
from tests.sampler_fields import needed

FILE = pathlib.Path(__file__).parents[2] / "accounting" / "README.md"
NOISE, DELTA, USER, CAP, BANDS = 1.0, 1e-5, 3, 170, 4
HEAD = (
    "| sampler | neighbours | unit | upper bound | lower bound | epsilon | elsewhere |",
    "|---|---|---|---|---|---|---|",
)
REFUSED = "refused"


def plan(sampler: str) -> DpSgdPlan:
    """Returns the plan of the table."""
    return DpSgdPlan(
        sampler=sampler,
        num_examples=10_000,
        expected_batch_size=100,
        num_steps=200,
        num_epochs=2,
        **needed(sampler, cap=CAP, bands=BANDS),
    )


def questions() -> list[tuple[str, dict[str, Any]]]:
    """Returns every sampler with every relation and, under zero-out, both units."""
    asked = [{"neighboring_relation": relation} for relation in RELATIONS]
    users = {"neighboring_relation": REPLACE_SPECIAL, "max_examples_per_user": USER}
    return [(name, each) for name in samplers() for each in (*asked, users)]


def answer(sampler: str, asked: dict[str, Any]) -> Bounds | None:
    """Returns bounds on epsilon, from both sides where both are known."""
    try:
        neighboring_relation.brought(sampler, **asked)
    except InputError:
        return None
    question = {"noise_multiplier": NOISE, "delta": DELTA, **asked}
    try:
        return poisson_batches.epsilon(plan(sampler), **question)
    except InputError:
        return accountant.epsilon(plan(sampler), **question)


def row(sampler: str, asked: dict[str, Any], elsewhere: str = "") -> str:
    """Returns the line of one question, without what others say if it is not given."""
    unit = "user" if "max_examples_per_user" in asked else "example"
    start = f"| {sampler} | {NAMES[asked['neighboring_relation']]} | {unit} |"
    found = answer(sampler, asked)
    if found is None:
        return f"{start} {REFUSED} | | | |"
    upper = math.ceil(found.guarantee * 1e4) / 1e4
    lower, below = "not known", ""
    if found.lower is not None:
        lower = found.lower_method or "the same"
        below = f"{math.floor(found.lower * 1e4) / 1e4:.4f} .. "
    return f"{start} {found.method} | {lower} | {below}{upper:.4f} | {elsewhere} |"


def elsewhere(sampler: str, asked: dict[str, Any]) -> str:
    """Returns what others say of the same question; empty if nobody can."""
    found = answer(sampler, asked)
    try:
        check.check_plan(plan(sampler), None, **asked)
    except InputError:
        return ""
    assert found is not None
    opinion = check.cross_check(
        plan(sampler), noise_multiplier=NOISE, delta=DELTA, ours=found, **asked
    ).opinions[0]
    assert opinion.disagreement is None
    if opinion.value == opinion.low:
        return ""  # a lower bound is no independent truth
    if opinion.quantity == "delta":
        return f"delta {opinion.low:.3g} .. {opinion.high:.3g}, simulated"
    version = opinion.source.split(",")[0]
    return f"{opinion.value:.4f}, {version}" if math.isfinite(opinion.value) else ""


def written() -> list[str]:
    """Returns the lines of the table as they stand in the file."""
    text = FILE.read_text(encoding="utf-8")
    body = text.split("\n".join(HEAD) + "\n", 1)[1]
    return re.match(r"(\|.*\n)+", body).group().splitlines()  # type: ignore[union-attr]


def write(keep_others: bool) -> None:
    """Writes the table anew."""
    if keep_others:
        others = [line.split("|")[-2].strip() for line in written()]
    else:
        others = [elsewhere(*each) if answer(*each) else "" for each in questions()]
    lines = [row(*each, other) for each, other in zip(questions(), others, strict=True)]
    text = FILE.read_text(encoding="utf-8")
    head = "\n".join(HEAD) + "\n"
    before, after = text.split(head, 1)
    rest = re.sub(r"\A(\|.*\n)*", "", after)
    FILE.write_text(before + head + "\n".join(lines) + "\n" + rest, encoding="utf-8")


if __name__ == "__main__":
    write("ours" in sys.argv[1:])
