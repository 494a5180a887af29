"""Flags of ``dpsgd train`` for averages of iterates, and the table of their metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from trainer.cli import run_flags
from trainer.model.metrics import in_words, metric_names
from trainer.settings.aggregation_settings import (
    MEANINGS,
    OMV,
    PAST_WEIGHT_AVERAGES,
    TRAINING_AVERAGES,
    AggregationSettings,
)

_OPTIONS = (
    click.option(
        "--ema-decay",
        type=float,
        help="Average the weights while training with this decay, such as 0.999: an "
        "exponential moving average with warm-up.  Costs no privacy, like all averages "
        "here.",
    ),
    click.option(
        "--tail",
        type=int,
        metavar="K",
        help="Average the weights of the last K steps while training; needs K+2 copies "
        "of them in memory and in checkpoints.",
    ),
    click.option(
        "--aggregate",
        metavar="MODULE:FUNCTION",
        help="Your own aggregate, of the last --tail iterates while training and of "
        "the --keep-last kept iterates: a function that takes a list of iterates, "
        "oldest first, each a list of NumPy arrays, and returns one.",
    ),
    click.option(
        "--train-over",
        type=click.Choice(TRAINING_AVERAGES),
        help="Start each step at this average instead of at the last weights.",
    ),
    click.option(
        "--aggregate-from",
        type=int,
        metavar="TAU",
        help="First step that starts at the average.  [default: 0]",
    ),
    click.option(
        "--evaluate-averages",
        is_flag=True,
        help="Also evaluate these averages at every point of OUT/curve.json.",
    ),
    run_flags.keep_last(
        help="Keep K iterates in OUT/iterates, and evaluate averages of their weights "
        "and of their predictions.",
    ),
    click.option(
        "--keep-every",
        type=int,
        metavar="S",
        help="Steps between kept iterates, of which the last is the final one.  "
        "[default: spread over the second half of the run]",
    ),
    click.option(
        "--keep-decay",
        type=float,
        default=AggregationSettings.keep_decay,
        show_default=True,
        help="Decay per iterate of the moving average over kept iterates.",
    ),
    click.option(
        "--export",
        multiple=True,
        type=click.Choice(PAST_WEIGHT_AVERAGES),
        help="Also export this average of kept weights; may be repeated.",
    ),
    click.option(
        "--uncertainty",
        type=float,
        metavar="LEVEL",
        help="Write intervals of this level, such as 0.95, for all held-out "
        "predictions, from kept iterates: how much the predictions vary with the "
        "noise.",
    ),
)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def metrics_text(metrics: dict[str, Any]) -> str:
    """Returns the metrics of a run as text: one line, or a table.

    Example:
      >>> last = {"auc": 0.75, "log_loss": 0.5, "accuracy": 0.8}
      >>> print(metrics_text({**last, "aggregates": {}, "uncertainty": None}))
      held-out AUC 0.7500, log loss 0.5000, accuracy 0.8000
    """
    names = metric_names(metrics)
    if not metrics["aggregates"]:
        pairs = zip(map(in_words, names), _numbers(metrics, names), strict=True)
        return "held-out " + ", ".join(map(" ".join, pairs))
    rows = [("held-out metrics of", *map(in_words, names))]
    rows.append(("last iterate", *_numbers(metrics, names)))
    for name, values in metrics["aggregates"].items():
        rows.append((f"{name}: {MEANINGS[name]}", *_numbers(values, names)))
    width = max(len(row[0]) for row in rows)
    lines = [
        f"{row[0]:<{width}}" + "".join(f"{x:>11}" for x in row[1:]) for row in rows
    ]
    return "\n".join([*lines, *_notes(metrics)])


def _numbers(metrics: dict[str, Any], names: list[str]) -> list[str]:
    values = (metrics.get(name) for name in names)
    return ["-" if x is None else f"{x:.4f}" for x in values]


def _width(found: float | dict[str, float]) -> str:
    if isinstance(found, dict):
        return ", ".join(f"{width:.4f} of {name}" for name, width in found.items())
    return f"{found:.4f}"


def _notes(metrics: dict[str, Any]) -> list[str]:
    notes = []
    if OMV in metrics["aggregates"] and "auc" in metrics:
        notes.append(
            "A majority vote of k iterates has only k + 1 levels: use its accuracy, "
            "not its AUC."
        )
    if metrics["uncertainty"] is not None:
        found = metrics["uncertainty"]
        width = _width(found["mean_width"])
        notes.append(
            f"Intervals of level {found['level']:g}: mean width {width}, in "
            "uncertainty.parquet. They cover only the variation by the noise: a "
            "lower bound on the true uncertainty."
        )
    return notes
