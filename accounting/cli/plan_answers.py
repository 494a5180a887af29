"""The body of ``dpsgd plan``: asks the accountant, and prints or draws the answers.

Proven numbers are rounded up, and lower bounds are rounded down.  Where only a lower
bound is known, the answer says that it is no guarantee.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from accounting import comparison
from accounting.bands import best_bands
from accounting.claims.selection import Tuning
from accounting.cli import options
from accounting.cli.options import PlanOptions
from accounting.comparison import (
    NOISE,
    TOTAL_NOISE_AXIS,
    Answer,
    Line,
    Question,
    Sweep,
)
from accounting.core import plan as plans
from accounting.core import sampler_registry
from accounting.core.intervals import upper_text
from accounting.core.validation import InputError, check_choice, check_claimed_delta

if TYPE_CHECKING:
    from accounting.core.claim import Theorem

#: An option, and another that it needs.
_NEEDS = (
    ("values", "sweep"),
    ("sweep", "values"),
    ("plot", "sweep"),
    ("tan", "sweep"),
    ("also_num_steps", "tan"),
    ("mix_width", "l2_norm_clip"),
    ("l2_norm_clip", "mix_width"),
    ("linf_factor", "mix_width"),
)
#: Two options that exclude each other, and why.
_EXCLUSIVE = (
    ("tan", "mix_width", "TAN is for DP-SGD"),
    ("tan", "max_examples_per_user", "TAN is for one example"),
    ("tan", "of_runs", "TAN is for one run"),
    ("tan", "epsilon", "TAN answers epsilon"),
    *(
        ("runs", name, "a price is for one plan")
        for name in ("sweep", "mix_width", "of_runs")
    ),
    *(
        ("runs", name, "the theorem of a search is for rows under zero-out")
        for name in ("max_examples_per_user", "relation")
    ),
)


def print_answers(asked: PlanOptions, *, as_json: bool) -> None:
    """Prints the answers to a ``dpsgd plan`` command, and draws them if asked to.

    Args:
      asked: Options of the command.
      as_json: Whether to print JSON.

    Raises:
      InputError: options that contradict each other, or a value out of range.
    """
    _check_options(asked)
    question = _question(asked)
    asked = dataclasses.replace(
        asked, sampler=_with_bands(asked.sampler, question.bands)
    )
    options.warn(question.delta, question.num_examples)
    if asked.sweep is not None:
        found = _sweep(question, asked, asked.sweep)
    elif asked.runs is not None:
        found = _tuning(question, asked, asked.runs)
    else:
        found = _comparison(question, asked)
    if as_json:
        described = {"question": dataclasses.asdict(question), **found.fields}
        print(json.dumps(described, indent=2))
        return
    print(found.heading)
    Console(markup=False).print(found.table)
    if found.note:
        print(found.note)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """The answers, for machines and for people."""

    fields: dict[str, Any]
    heading: str
    table: Table
    note: str = ""


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows on a terminal's standard error what is computed."""
    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(f"{text} ...")


# -- samplers side by side -------------------------------------------------------------


def _comparison(question: Question, asked: PlanOptions) -> _Found:
    lines = _lines([question], asked, sampler_registry.names())
    rows: list[Answer] = []
    with _progress() as show:
        for line in lines:
            show(f"{line.name}, {len(rows) + 1} of {len(lines)}")
            rows.append(comparison.answer(question, line))
    noise = question.asks_for == NOISE
    table = Table()
    table.add_column("sampler", no_wrap=True)
    table.add_column("noise" if noise else "epsilon", justify="right", no_wrap=True)
    table.add_column("bound")
    truncated = any(row.padding is not None for row in rows)
    if truncated:
        table.add_column("truncated at", justify="right")
        table.add_column("padding", justify="right")
    for row in rows:
        size, padding = row.plan.truncated_batch_size, row.padding
        cells = "" if size is None else f"{size:,}", ""
        if padding is not None:
            cells = cells[0], f"{padding:.1%}"
        table.add_row(row.line.name, *value_cells(row), *(cells if truncated else ()))
    each = "" if question.of_runs == 1 else ", in each run"
    return _Found(
        fields={"answers": [row.to_json() for row in rows]},
        heading=question.in_words() + each,
        table=table,
    )


def value_cells(row: Answer) -> tuple[str, str]:
    """Returns the bounds of an answer, and what kind they are of."""
    no_guarantee = "" if row.proven is not None else ": no guarantee"
    return _range(row), f"{row.bounds.kind}{no_guarantee}"


def _range(row: Answer) -> str:
    if row.proven is None:
        return f">= {row.least_text}"
    if row.bounds.least is None or row.is_exact:
        return row.proven_text
    return f"{row.least_text} .. {row.proven_text}"


def _lines(
    questions: list[Question], asked: PlanOptions, samplers: tuple[str, ...]
) -> tuple[Line, ...]:
    """Returns the lines to answer: samplers, and what other options ask for."""
    chosen, theorems = asked.sampler, _theorems(asked)
    if not chosen and (theorems or asked.tan):
        chosen = (plans.POISSON,)
    if not chosen:
        chosen = tuple(
            name
            for name in samplers
            if all(comparison.is_answered(question, name) for question in questions)
        )
        chosen = chosen or samplers[:1]  # for its error
    analysed = sampler_registry.poisson_samplers()
    if asked.tan:
        for name in chosen:
            check_choice("sampler", name, analysed)
    if asked.tan and asked.sweep == TOTAL_NOISE_AXIS:
        numbers = (questions[0].num_steps, *(asked.also_num_steps or ()))
        return tuple(
            Line(sampler=name, label=f"{steps:,} steps", total_noise_steps=steps)
            for name in chosen
            for steps in dict.fromkeys(numbers)
        )
    # If no sampler has such a theorem, the first one is kept for its error.
    mixed = [name for name in chosen if name in analysed] or chosen[:1]
    return tuple(Line(sampler=name) for name in chosen) + tuple(
        Line(sampler=name, theorem=theorem, label=label)
        for name in mixed
        for label, theorem in theorems.items()
    )


def _theorems(asked: PlanOptions) -> dict[str, Theorem]:
    """Returns label -> theorem of ModelMix, for each width and factor."""
    if asked.mix_width is None or asked.l2_norm_clip is None:
        return {}
    from accounting.claims.model_mix import Mixing  # it loads scipy

    return {
        f"ModelMix {width:g}, p={factor}": Mixing(
            mix_width=width, l2_norm_clip=asked.l2_norm_clip, linf_factor=factor
        )
        for factor in asked.linf_factor or (1,)
        for width in asked.mix_width
    }


# -- tuning ----------------------------------------------------------------------------


def _tuning(question: Question, asked: PlanOptions, runs: int) -> _Found:
    sampler = (*asked.sampler, plans.TRUNCATED_POISSON)[0]
    priced = Tuning(plan=question.plan(sampler), num_runs=runs, delta=question.delta)
    with _progress() as show:
        if question.noise_multiplier is not None:
            price = priced.at_noise(question.noise_multiplier)
        else:
            assert question.epsilon is not None
            price = priced.for_epsilon(question.epsilon, show)
    table = Table()
    for heading in ("noise of each run", "epsilon of the best", "expected runs"):
        table.add_column(heading, justify="right")
    noise, epsilon = upper_text(price.noise_multiplier), upper_text(price.epsilon)
    table.add_row(noise, epsilon, f"{price.runs.mean:.1f}")
    return _Found(
        fields={"sampler": sampler, "price": price.to_json()},
        heading=f"{sampler}: {question.in_words()}",
        table=table,
        note="The number of runs is secret, and only the best is released. It tries a "
        f"candidate of the best tenth as surely as {runs} runs do "
        f"({price.runs.success():.0%}). Every run has its own batches and keys, and "
        "scores are of other rows, public or with noise.",
    )


# -- a sweep ---------------------------------------------------------------------------


def _sweep(question: Question, asked: PlanOptions, axis: str) -> _Found:
    values = comparison.check_values(axis, asked.values or ())
    if axis == "delta":
        for value in values:
            check_claimed_delta(value, allow_large=asked.allow_large_delta)
    if asked.plot is not None:
        from accounting import plots  # matplotlib, for this option alone

        plots.check_path(asked.plot)
    held = asked.tan and axis == TOTAL_NOISE_AXIS
    questions = [question if held else comparison.at(question, axis, v) for v in values]
    lines = _lines(questions, asked, comparison.default_samplers())
    with _progress() as show:
        found = comparison.sweep(question, axis, lines, values=values, progress=show)
    if asked.plot is not None:
        plots.draw_sweep(found, asked.plot, tan=asked.tan)
    swept = []
    for line, answers in zip(found.lines, found.answers, strict=True):
        points = [{"value": found.value(each), **each.to_json()} for each in answers]
        if asked.tan:
            for point, each in zip(points, answers, strict=True):
                epsilon, eta = comparison.tan_epsilon(each), comparison.eta(each)
                point["tan_estimate"] = {"epsilon": epsilon, "eta": eta}
        swept.append({"name": line.name, "points": points})
    return _Found(
        fields={"sweep": axis, "lines": swept},
        heading=found.title,
        table=_sweep_table(found, asked.tan),
        note="TAN: the closed form of epsilon, an estimate and no guarantee. Below "
        f"noise multiplier {comparison.LEAST_NOISE:g} the true epsilon may be far "
        "larger."
        if asked.tan
        else "",
    )


def _sweep_table(sweep: Sweep, tan: bool) -> Table:
    table = Table()
    table.add_column(sweep.axis, justify="right", overflow="fold")
    table.add_column("line", overflow="fold")
    table.add_column(sweep.asks_for, justify="right", no_wrap=True)
    if tan:
        table.add_column("TAN", justify="right", no_wrap=True)
    for place, value in enumerate(sweep.values):
        # Unrounded: what is proven there holds there.
        number = f"{int(value):,}" if float(value).is_integer() else repr(float(value))
        for line, answers in zip(sweep.lines, sweep.answers, strict=True):
            answer = answers[place]
            estimate = (f"{comparison.tan_epsilon(answer):.4f}",) if tan else ()
            table.add_row(number, line.name, _range(answer), *estimate)
    return table


# -- options ---------------------------------------------------------------------------


def _check_options(asked: PlanOptions) -> None:
    """Refuses options that contradict each other, or lack one that they need."""
    given = {
        field.name: f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(asked)
        if getattr(asked, field.name) != field.default
    }
    for name, needed in _NEEDS:
        if name in given and needed not in given:
            beside = f"--{needed.replace('_', '-')} beside {given[name]}"
            raise InputError(f"Expected {beside}. Give both.")
    for name, other, reason in _EXCLUSIVE:
        if name in given and other in given:
            both = f"{given[name]} or {given[other]}, not both"
            raise InputError(f"Expected {both}: {reason}. Omit one.")
    if ("epsilon" in given) == ("noise_multiplier" in given):
        remedy = "Omit one." if "epsilon" in given else "Give one."
        raise InputError(
            f"Expected exactly one of --epsilon and --noise-multiplier. {remedy}"
        )
    if asked.tan and asked.sweep == "epsilon":
        raise InputError("Expected --tan or --sweep epsilon, not both. Omit one.")
    if asked.runs is not None and len(asked.sampler) > 1:
        raise InputError("Expected one --sampler beside --runs. Name one.")
    if asked.also_num_steps and asked.sweep != TOTAL_NOISE_AXIS:
        raise InputError(
            f"Expected --sweep {TOTAL_NOISE_AXIS} beside --also-num-steps, not "
            f"{asked.sweep}: only that sweep holds the total noise. Use it, or omit "
            "--also-num-steps."
        )


def _question(asked: PlanOptions) -> Question:
    cap, samplers = asked.truncated_batch_size, asked.sampler
    given = None if isinstance(cap, str) else cap
    capped = [
        n for n in sampler_registry.names() if sampler_registry.rules(n).truncates
    ]
    if given is not None and samplers and not set(capped) & set(samplers):
        raise InputError(
            f"Expected no truncated_batch_size={given} beside --sampler "
            f"{samplers[0]}: only {' and '.join(capped)} have a cap. Omit it."
        )
    num_steps, num_epochs = plans.steps_and_epochs(
        asked.num_examples,
        asked.batch_size,
        epochs=asked.epochs,
        num_steps=asked.num_steps,
    )
    found = Question(
        num_examples=asked.num_examples,
        expected_batch_size=asked.batch_size,
        num_steps=num_steps,
        num_epochs=num_epochs,
        delta=asked.delta,
        epsilon=asked.epsilon,
        noise_multiplier=asked.noise_multiplier,
        holds_steps=asked.num_steps is not None,
        truncated_batch_size=given,
        neighboring_relation=asked.relation,
        max_examples_per_user=asked.max_examples_per_user,
        of_runs=asked.of_runs,
    )
    bands, others = asked.bands, (samplers, asked.sweep, asked.runs, asked.mix_width)
    # By the rule beside all other samplers, where it has an answer.
    is_for_rows = asked.epsilon is not None and asked.max_examples_per_user == 1
    if bands is None and is_for_rows and not any(others):
        bands = "auto"
    if isinstance(bands, str):
        bands = _best_bands(found)
    # 1 is independent noise.
    return dataclasses.replace(found, bands=None if bands == 1 else bands)


def _with_bands(samplers: tuple[str, ...], bands: int | None) -> tuple[str, ...]:
    """Returns the samplers, made cyclic if there are bands, as `dpsgd batches` does.

    Raises:
      InputError: there are bands, and no sampler has a cyclic variant.
    """
    if bands is None or any(sampler_registry.rules(name).cyclic for name in samplers):
        return samplers
    found = tuple(plans.CYCLIC.get(name, name) for name in samplers)
    if samplers and found == samplers:
        raise InputError(
            f"Expected --bands={bands} with {' or '.join(plans.CYCLIC)}; sampler is "
            f"{samplers[0]}. Leave it out."
        )
    return found


def _best_bands(question: Question) -> int:
    """Returns the number of bands by the rule, and says it."""
    if question.epsilon is None or question.max_examples_per_user > 1:
        raise InputError(
            "Expected --epsilon, and one example per user, for --bands auto: the rule "
            "compares noise for rows at one epsilon. Give --epsilon, or a number."
        )
    found = best_bands(
        num_examples=question.num_examples,
        expected_batch_size=question.expected_batch_size,
        num_steps=question.num_steps,
        epsilon=question.epsilon,
        delta=question.delta,
        neighboring_relation=question.neighboring_relation,
        of_runs=question.of_runs,
    )
    print(f"bands: {found.in_words}", file=sys.stderr)
    return found.bands
