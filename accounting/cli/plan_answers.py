"""The body of ``dpsgd plan``: asks the accountant, and prints or draws the answers."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from accounting.cli import options, plan_tables
from accounting.cli.plan_options import PlanOptions
from accounting.cli.progress import Progress
from accounting.core import accountant, deltas, sampler_registry
from accounting.core import plan as plans
from accounting.core.validation import InputError, check_int
from accounting.planning import comparison, sweeps, tuning
from accounting.planning.bands import best_bands
from accounting.planning.comparison import Answer, Question
from accounting.planning.sweeps import TOTAL_NOISE_AXIS, Point, Sweep, SweepLine
from accounting.planning.tuning import Price, Tuning

if TYPE_CHECKING:
    from accounting.core.claim import Theorem

#: Of the price of a search, without --sampler.
_OF_PRICES = plans.TRUNCATED_POISSON


def print_answers(asked: PlanOptions, *, as_json: bool) -> None:
    """Prints the answers to a ``dpsgd plan`` command, and draws them if asked to.

    Args:
      asked: Options of the command.
      as_json: Whether to print JSON.

    Raises:
      InputError: flags that contradict each other, or a value out of range.
    """
    _check_options(asked)
    question = _question(asked)
    samplers = asked.sampler or (() if asked.runs is None else (_OF_PRICES,))
    samplers = _with_bands(samplers, question.bands)
    asked = dataclasses.replace(asked, sampler=samplers)
    options.warn(question.delta, question.num_examples)
    plot = asked.plot
    if plot is not None:
        from accounting import plots  # matplotlib, for this flag alone

        plots.check_path(plot)
    if asked.sweep is not None:
        _sweep(question, asked, as_json)
        return
    if asked.runs is not None:
        _tuning(question, asked, as_json)
        return
    rows = _rows(question, _lines([question], asked, sampler_registry.names()))
    if as_json:
        answers = {"answers": [row.to_json() for row in rows]}
        print(json.dumps({**_described(question), **answers}, indent=2))
    else:
        plan_tables.print_table(question, rows)


def _rows(question: Question, lines: tuple[SweepLine, ...]) -> list[Answer]:
    """Returns the answer of each line; a terminal gets the default sampler's first."""
    found: dict[SweepLine, Answer] = {}
    with Progress() as progress:
        for line in sorted(
            lines, key=lambda line: line.sampler != plans.TRUNCATED_POISSON
        ):
            progress.show(f"{line.name}, {len(found) + 1} of {len(lines)}")
            found[line] = comparison.answer(question, line)
            if len(lines) > len(found) == 1:
                progress.say(plan_tables.in_words(found[line]))
    return [found[line] for line in lines]


# -- lines -----------------------------------------------------------------------------


def _lines(
    questions: list[Question], asked: PlanOptions, samplers: tuple[str, ...]
) -> tuple[SweepLine, ...]:
    """Returns the lines to answer: samplers, and what other flags ask for."""
    chosen, theorems = asked.sampler, _theorems(asked)
    if not chosen and (theorems or asked.tan):
        chosen = (plans.POISSON,)
    chosen = chosen or _supported(questions, samplers)
    if asked.tan and asked.sweep == TOTAL_NOISE_AXIS:
        numbers = (questions[0].num_steps, *(asked.also_num_steps or ()))
        return tuple(
            SweepLine(sampler=name, label=f"{steps:,} steps", total_noise_steps=steps)
            for name in chosen
            for steps in dict.fromkeys(numbers)
        )
    plain = tuple(SweepLine(sampler=name) for name in chosen)
    # If no sampler has such a theorem, the first one is kept for its error.
    analysed = set(sampler_registry.poisson_samplers())
    mixed = [name for name in chosen if name in analysed] or chosen[:1]
    return plain + tuple(
        SweepLine(sampler=name, theorem=theorem, label=label)
        for name in mixed
        for label, theorem in theorems.items()
    )


def _supported(questions: list[Question], samplers: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the samplers that are accounted for in all questions."""
    supported = [
        name
        for name in samplers
        if all(comparison.is_answered(question, name) for question in questions)
    ]
    # If there are none, the first one is kept for its error.
    return tuple(supported) or samplers[:1]


# -- tuning ----------------------------------------------------------------------------


def _tuning(question: Question, asked: PlanOptions, as_json: bool) -> None:
    (sampler,) = asked.sampler
    assert asked.runs is not None
    priced = Tuning(
        plan=question.plan(sampler),
        num_runs=asked.runs,
        delta=question.delta,
        neighboring_relation=question.neighboring_relation,
        max_examples_per_user=question.max_examples_per_user,
    )
    found: list[Price] = []
    with Progress() as progress:
        for mode in (tuning.ONE, tuning.ALL, tuning.BEST):
            progress.show(f"tuning, {mode}")
            if question.noise_multiplier is not None:
                found.append(priced.at_noise(mode, question.noise_multiplier))
                continue
            assert question.epsilon is not None
            found.append(priced.for_epsilon(mode, question.epsilon, progress.show))
    if as_json:
        answers = {"sampler": sampler, "prices": [each.to_json() for each in found]}
        print(json.dumps({**_described(question), **answers}, indent=2))
    else:
        plan_tables.print_prices(question, priced, found)


# -- a sweep ---------------------------------------------------------------------------


def _sweep(question: Question, asked: PlanOptions, as_json: bool) -> None:
    axis, plot = asked.sweep, asked.plot
    assert axis is not None
    values = sweeps.check_values(axis, asked.values or ())
    if axis == "delta":
        for value in values:
            deltas.check(value, allow_large=asked.allow_large_delta)
    holds = asked.tan and axis == TOTAL_NOISE_AXIS
    questions = [question if holds else sweeps.at(question, axis, v) for v in values]
    lines = _lines(questions, asked, sweeps.default_samplers())
    with Progress() as progress:
        found = sweeps.sweep(
            question,
            axis,
            lines,
            values=values,
            estimates=asked.tan,
            progress=progress.show,
        )
    if plot is not None:
        from accounting import plots

        plots.draw_sweep(found, plot)
    if as_json:
        print(json.dumps(_sweep_json(found), indent=2))
    else:
        plan_tables.print_sweep(found)


def _sweep_json(sweep: Sweep) -> dict[str, Any]:
    return {
        **_described(sweep.question),
        "sweep": sweep.axis,
        "lines": [
            {"name": line.name, "points": [_point_json(sweep, each) for each in points]}
            for line, points in zip(sweep.lines, sweep.points, strict=True)
        ],
    }


def _point_json(sweep: Sweep, point: Point) -> dict[str, Any]:
    estimate = point.estimate
    return {
        "value": sweeps.AXES[sweep.axis].read(point.question),
        **point.answer.to_json(),
        **({} if estimate is None else {"tan_estimate": dataclasses.asdict(estimate)}),
    }


# -- flags -----------------------------------------------------------------------------


def _check_options(asked: PlanOptions) -> None:
    """Refuses flags that contradict each other, or lack a flag that they need.

    Raises:
      InputError: there are such flags.
    """
    needs = (
        ("values", "sweep", "--sweep"),
        ("sweep", "values", "--values"),
        ("plot", "sweep", "--sweep"),
        ("tan", "sweep", "--sweep"),
        ("also_num_steps", "tan", "--tan"),
    )
    check_int("of_runs", asked.of_runs, at_least=1, at_most=plans.MOST_RUNS)
    _check_tuning(asked)
    for option, needed, name in needs:
        # By identity, since 0.0 equals False.
        given, beside = getattr(asked, option), getattr(asked, needed)
        if given not in (None, False) and (beside is None or beside is False):
            raise InputError(
                f"Expected {name} beside --{option.replace('_', '-')}. Give both."
            )
    if (asked.epsilon is None) == (asked.noise_multiplier is None):
        remedy = "Give one." if asked.epsilon is None else "Omit one."
        raise InputError(
            f"Expected exactly one of --epsilon and --noise-multiplier. {remedy}"
        )
    if asked.tan and _theorems(asked):
        raise InputError(
            "Expected --tan or --mix-width, not both: TAN is for DP-SGD. Omit one."
        )
    if asked.tan and asked.max_examples_per_user > 1:
        raise InputError(
            "Expected --tan or users with several examples, not both: TAN is for one "
            "example. Omit --max-examples-per-user."
        )
    if asked.tan and asked.of_runs != 1:
        raise InputError(
            "Expected --tan or --of-runs, not both: TAN is for one run. Omit one."
        )
    if asked.also_num_steps and asked.sweep != TOTAL_NOISE_AXIS:
        raise InputError(
            f"Expected --sweep {TOTAL_NOISE_AXIS} beside --also-num-steps, not "
            f"{asked.sweep}: only that sweep holds the total noise. Use it, or omit "
            "--also-num-steps."
        )


def _check_tuning(asked: PlanOptions) -> None:
    if asked.runs is None:
        return
    others = ("sweep", "tan", "plot")
    given = [f"--{name}" for name in others if getattr(asked, name)]
    given += ["--mix-width"] if _theorems(asked) else []
    given += ["--of-runs"] if asked.of_runs != 1 else []
    given += ["several --sampler"] if len(asked.sampler) > 1 else []
    if given:
        raise InputError(
            f"Expected --runs or {given[0]}, not both: a price is for one plan. Omit "
            "one."
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
    if asked.epsilon is not None:
        comparison.check_target(asked.epsilon)
    if asked.noise_multiplier is not None:
        accountant.check_noise_multiplier(asked.noise_multiplier)
    num_examples, batch_size = asked.num_examples, asked.batch_size
    num_steps, num_epochs = plans.steps_and_epochs(
        num_examples,
        batch_size,
        epochs=asked.epochs,
        num_steps=asked.num_steps,
    )
    bands = asked.bands
    if isinstance(bands, str) or (bands is None and _suits_rule(asked)):
        bands = _best_bands(asked, num_steps)
    return Question(
        num_examples=num_examples,
        expected_batch_size=batch_size,
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
        bands=None if bands == 1 else bands,  # 1 is independent noise
    )


def _suits_rule(asked: PlanOptions) -> bool:
    """Whether the number of bands by the rule is shown beside the other samplers."""
    others = (asked.sampler, asked.sweep, asked.runs, asked.mix_width)
    is_for_rows = asked.epsilon is not None and asked.max_examples_per_user == 1
    return is_for_rows and not any(others)


def _with_bands(samplers: tuple[str, ...], bands: int | None) -> tuple[str, ...]:
    """Returns the samplers, of groups where there are bands, as `dpsgd batches` does.

    Raises:
      InputError: there are bands, and no sampler has groups.
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


def _best_bands(asked: PlanOptions, num_steps: int) -> int:
    """Returns the number of bands by the rule, and says it."""
    if asked.epsilon is None or asked.max_examples_per_user > 1:
        raise InputError(
            "Expected --epsilon, and one example per user, for --bands auto: the rule "
            "compares noise for rows at one epsilon. Give --epsilon, or a number."
        )
    found = best_bands(
        num_examples=asked.num_examples,
        expected_batch_size=asked.batch_size,
        num_steps=num_steps,
        epsilon=asked.epsilon,
        delta=asked.delta,
        neighboring_relation=asked.relation,
        of_runs=asked.of_runs,
    )
    print(f"bands: {found.in_words}", file=sys.stderr)
    return found.bands


def _described(question: Question) -> dict[str, Any]:
    return {
        "question": dataclasses.asdict(question),
        "neighboring_relation": question.neighboring_relation,
    }


def _theorems(asked: PlanOptions) -> dict[str, Theorem]:
    """Returns label -> theorem of ModelMix, for each width and factor.

    Raises:
      InputError: a value out of range, or an option without another that it needs.
    """
    widths, clip = asked.mix_width, asked.l2_norm_clip
    for name, given in (("linf-factor", asked.linf_factor), ("l2-norm-clip", clip)):
        if given is not None and widths is None:
            raise InputError(f"Expected --mix-width beside --{name}. Give both.")
    if widths is None:
        return {}
    if clip is None:
        raise InputError("Expected --l2-norm-clip beside --mix-width. Give both.")
    from accounting.claims.model_mix import Mixing  # it loads scipy

    return {
        f"ModelMix {width:g}, p={factor}": Mixing(
            mix_width=width, l2_norm_clip=clip, linf_factor=factor
        )
        for factor in asked.linf_factor or (1,)
        for width in widths
    }
