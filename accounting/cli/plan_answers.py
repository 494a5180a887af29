"""The body of ``dpsgd plan``: asks the accountant, and prints or draws the answers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from accounting.cli import model_mix, plan_tables, shared_options
from accounting.cli.progress import Progress
from accounting.core import accountant, deltas, neighboring_relation, sampler_registry
from accounting.core import plan as plans
from accounting.core.validation import InputError, check_int
from accounting.planning import comparison, sweeps, tuning
from accounting.planning.bands import best_bands
from accounting.planning.comparison import Answer, Question
from accounting.planning.sweeps import TOTAL_NOISE_AXIS, Point, Sweep, SweepLine
from accounting.planning.tuning import Price, Tuning


def print_answers(flags: dict[str, Any]) -> None:
    """Prints the answers to a ``dpsgd plan`` command, and draws them if asked to.

    Raises:
      InputError: flags that contradict each other, or a value out of range.
    """
    _check_flags(flags)
    question = _question(flags)
    shared_options.warn(question.delta, question.num_examples)
    plot, as_json = flags["plot"], flags["as_json"]
    if plot is not None:
        from accounting import plots  # matplotlib, for this flag alone

        plots.check_path(plot)
    if flags["sweep"] is not None:
        _sweep(question, flags)
        return
    if flags["runs"] is not None:
        _tuning(question, flags)
        return
    rows = _rows(question, _lines([question], flags, sampler_registry.names()))
    if plot is not None:
        from accounting.planning import pictures

        pictures.draw_comparison(question, rows, plot)
    if as_json:
        answers = {"answers": [row.to_json() for row in rows]}
        click.echo(json.dumps({**_asked(question), **answers}, indent=2))
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
    questions: list[Question], flags: dict[str, Any], samplers: tuple[str, ...]
) -> tuple[SweepLine, ...]:
    """Returns the lines to answer: samplers, and what other flags ask for."""
    chosen, theorems = flags["samplers"], model_mix.theorems(flags)
    if not chosen and (theorems or flags["tan"]):
        chosen = (plans.POISSON,)
    chosen = chosen or _supported(questions, samplers)
    if flags["tan"] and flags["sweep"] == TOTAL_NOISE_AXIS:
        numbers = (questions[0].num_steps, *(flags["also_num_steps"] or ()))
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
        if all(_is_supported(question, name) for question in questions)
    ]
    # If there are none, the first one is kept for its error.
    return tuple(supported) or samplers[:1]


def _is_supported(question: Question, sampler: str) -> bool:
    # Samplers that use every example once per epoch need whole epochs.
    steps = plans.steps_per_epoch(question.num_examples, question.expected_batch_size)
    whole = question.num_steps == question.num_epochs * steps
    rules = sampler_registry.rules(sampler)
    composes = question.of_runs == 1 or rules.composes
    return (
        composes
        and not (rules.cyclic and question.bands is None)
        and neighboring_relation.is_supported(
            sampler, question.neighboring_relation, question.max_examples_per_user
        )
        and (whole or not plans.goes_through_epochs(sampler))
    )


# -- tuning ----------------------------------------------------------------------------


def _tuning(question: Question, flags: dict[str, Any]) -> None:
    sampler = (*flags["samplers"], plans.TRUNCATED_POISSON)[0]
    asked = Tuning(
        plan=question.plan(sampler),
        num_runs=flags["runs"],
        delta=question.delta,
        neighboring_relation=question.neighboring_relation,
        max_examples_per_user=question.max_examples_per_user,
    )
    found: list[Price] = []
    with Progress() as progress:
        for mode in (tuning.ONE, tuning.ALL, tuning.BEST):
            progress.show(f"tuning, {mode}")
            if question.noise_multiplier is not None:
                found.append(asked.at_noise(mode, question.noise_multiplier))
                continue
            assert question.epsilon is not None
            found.append(asked.for_epsilon(mode, question.epsilon, progress.show))
    if flags["as_json"]:
        answers = {"sampler": sampler, "prices": [each.to_json() for each in found]}
        click.echo(json.dumps({**_asked(question), **answers}, indent=2))
    else:
        plan_tables.print_prices(question, asked, found)


# -- a sweep ---------------------------------------------------------------------------


def _sweep(question: Question, flags: dict[str, Any]) -> None:
    axis, plot = flags["sweep"], flags["plot"]
    values = sweeps.check_values(axis, flags["values"])
    if axis == "delta":
        for value in values:
            deltas.check(value, allow_large=flags["allow_large_delta"])
    holds = flags["tan"] and axis == TOTAL_NOISE_AXIS
    asked = [question if holds else sweeps.at(question, axis, v) for v in values]
    lines = _lines(asked, flags, sweeps.default_samplers())
    with Progress() as progress:
        found = sweeps.sweep(
            question,
            axis,
            lines,
            values=values,
            estimates=flags["tan"],
            progress=progress.show,
        )
    if plot is not None:
        from accounting.planning import pictures

        pictures.draw_sweep(found, plot)
    if flags["as_json"]:
        click.echo(json.dumps(_sweep_json(found), indent=2))
    else:
        plan_tables.print_sweep(found)


def _sweep_json(sweep: Sweep) -> dict[str, Any]:
    return {
        **_asked(sweep.question),
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


def _check_flags(flags: dict[str, Any]) -> None:
    """Refuses flags that contradict each other, or lack a flag that they need.

    Raises:
      InputError: there are such flags.
    """
    needs = (
        ("values", "sweep", "--sweep"),
        ("sweep", "values", "--values"),
        ("tan", "sweep", "--sweep"),
        ("also_num_steps", "tan", "--tan"),
    )
    check_int("of_runs", flags["of_runs"], at_least=1, at_most=plans.MOST_RUNS)
    _check_tuning(flags)
    for flag, needed, name in needs:
        # By identity, since 0.0 equals False.
        given, beside = flags[flag], flags[needed]
        if given not in (None, False) and (beside is None or beside is False):
            raise InputError(
                f"Expected {name} beside --{flag.replace('_', '-')}. Give both."
            )
    if (flags["epsilon"] is None) == (flags["noise_multiplier"] is None):
        remedy = "Give one." if flags["epsilon"] is None else "Omit one."
        raise InputError(
            f"Expected exactly one of --epsilon and --noise-multiplier. {remedy}"
        )
    if flags["tan"] and model_mix.theorems(flags):
        raise InputError(
            "Expected --tan or --mix-width, not both: TAN is for DP-SGD. Omit one."
        )
    if flags["tan"] and flags["max_examples_per_user"] > 1:
        raise InputError(
            "Expected --tan or users with several examples, not both: TAN is for one "
            "example. Omit --max-examples-per-user."
        )
    if flags["tan"] and flags["of_runs"] != 1:
        raise InputError(
            "Expected --tan or --of-runs, not both: TAN is for one run. Omit one."
        )
    if flags["also_num_steps"] and flags["sweep"] != TOTAL_NOISE_AXIS:
        raise InputError(
            f"Expected --sweep {TOTAL_NOISE_AXIS} beside --also-num-steps, not "
            f"{flags['sweep']}: only that sweep holds the total noise. Use it, or omit "
            "--also-num-steps."
        )


def _check_tuning(flags: dict[str, Any]) -> None:
    if flags["runs"] is None:
        return
    others = ("sweep", "tan", "plot")
    given = [f"--{name}" for name in others if flags[name] not in (None, False)]
    given += ["--mix-width"] if model_mix.theorems(flags) else []
    given += ["--of-runs"] if flags["of_runs"] != 1 else []
    given += ["several --sampler"] if len(flags["samplers"]) > 1 else []
    if given:
        raise InputError(
            f"Expected --runs or {given[0]}, not both: a price is for one plan. Omit "
            "one."
        )


def _question(flags: dict[str, Any]) -> Question:
    given, samplers = flags["truncated_batch_size"], flags["samplers"]
    capped = [
        n for n in sampler_registry.names() if sampler_registry.rules(n).truncates
    ]
    if given is not None and samplers and not set(capped) & set(samplers):
        raise InputError(
            f"Expected no truncated_batch_size={given} beside --sampler "
            f"{samplers[0]}: only {' and '.join(capped)} have a cap. Omit it."
        )
    cyclic = [n for n in sampler_registry.names() if sampler_registry.rules(n).cyclic]
    bands = flags["bands"]
    if bands is not None and samplers and not set(cyclic) & set(samplers):
        raise InputError(
            f"Expected no bands={bands} beside --sampler {samplers[0]}: only "
            f"{' and '.join(cyclic)} have groups. Omit it."
        )
    if flags["epsilon"] is not None:
        comparison.check_target(flags["epsilon"])
    if flags["noise_multiplier"] is not None:
        accountant.check_noise_multiplier(flags["noise_multiplier"])
    num_examples, batch_size = flags["num_examples"], flags["batch_size"]
    num_steps, num_epochs = plans.steps_and_epochs(
        num_examples,
        batch_size,
        epochs=flags["epochs"],
        num_steps=flags["num_steps"],
    )
    if bands == plans.AUTO_BANDS:
        bands = _best_bands(flags, num_steps)
    if bands == 1:  # independent noise, as without the flag
        bands = None
    return Question(
        num_examples=num_examples,
        expected_batch_size=batch_size,
        num_steps=num_steps,
        num_epochs=num_epochs,
        delta=flags["delta"],
        epsilon=flags["epsilon"],
        noise_multiplier=flags["noise_multiplier"],
        holds_steps=flags["num_steps"] is not None,
        truncated_batch_size=given,
        neighboring_relation=flags["relation"],
        max_examples_per_user=flags["max_examples_per_user"],
        of_runs=flags["of_runs"],
        bands=bands,
    )


def _best_bands(flags: dict[str, Any], num_steps: int) -> int:
    """Returns the number of bands by the rule, and says it."""
    if flags["epsilon"] is None or flags["max_examples_per_user"] > 1:
        raise InputError(
            "Expected --epsilon, and one example per user, for --bands auto: the rule "
            "compares noise for rows at one epsilon. Give --epsilon, or a number."
        )
    found = best_bands(
        num_examples=flags["num_examples"],
        expected_batch_size=flags["batch_size"],
        num_steps=num_steps,
        epsilon=flags["epsilon"],
        delta=flags["delta"],
        neighboring_relation=flags["relation"],
    )
    click.echo(f"bands: {found.in_words}", err=True)
    return found.bands


def _asked(question: Question) -> dict[str, Any]:
    return {
        "question": dataclasses.asdict(question),
        "neighboring_relation": question.neighboring_relation,
    }
