"""The metrics of a run and of its averages, as text."""

from __future__ import annotations

from typing import Any

from trainer.model.metrics import in_words, metric_names
from trainer.report.run_files import warnings
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.train_settings import MEANINGS, OMV

#: Names that are too wide for a column.
_HEADINGS = {
    "calibration_error": "off by", "mean_squared_error": "MSE",
    "mean_absolute_error": "MAE",
}  # fmt: skip


def metrics_text(metrics: dict[str, Any]) -> str:
    """Returns the metrics of a run as a table, and what a person should know.

    Example:
      >>> last = {"auc": 0.75, "log_loss": 0.5, "accuracy": 0.8}
      >>> guess = {"auc": 0.5, "log_loss": 0.6, "accuracy": 0.7}
      >>> more = {"guessing": guess, "aggregates": {}}
      >>> print(metrics_text({**last, **more}))
      held-out metrics of        AUC   log loss   accuracy
      last iterate            0.7500     0.5000     0.8000
      guessing                0.5000     0.6000     0.7000
    """
    names = metric_names(metrics)
    rows = [("held-out metrics of", *(_HEADINGS.get(n, in_words(n)) for n in names))]
    shown = metrics.get("evaluation", {}).get("weights", "last")
    label = "last iterate" if shown == "last" else f"{shown}: {MEANINGS[shown]}"
    if metrics.get("method") == NON_PRIVATE:
        label = f"best iterate, step {metrics['step']}"
    rows.append((label, *_numbers(metrics, names)))
    for place, end in enumerate(("from", "to") if "intervals" in metrics else ()):
        ends = {name: each[place] for name, each in metrics["intervals"].items()}
        rows.append((f"95 % interval, {end}", *_numbers(ends, names)))
    for name, values in metrics["aggregates"].items():
        rows.append((f"{name}: {MEANINGS[name]}", *_numbers(values, names)))
    if metrics.get("guessing"):
        rows.append(("guessing", *_numbers(metrics["guessing"], names)))
    width = max(len(row[0]) for row in rows)
    lines = [
        f"{row[0]:<{width}}" + "".join(f"{x:>11}" for x in row[1:]) for row in rows
    ]
    return "\n".join([*lines, *_notes(metrics)])


def _numbers(metrics: dict[str, Any], names: list[str]) -> list[str]:
    values = (metrics.get(name) for name in names)
    return ["-" if x is None else f"{x:.4f}" for x in values]


def _notes(metrics: dict[str, Any]) -> list[str]:
    notes = [f"warning: {line}" for line in warnings(metrics)]
    if "l2_norm_clip" in metrics:
        notes.append(f"The automatic clip ended at {metrics['l2_norm_clip']:.3g}.")
    if "evaluation" in metrics:
        notes += _of_evaluation(metrics["evaluation"])
        if not metrics["intervals"]:
            notes.append("Noise hides every metric of so few rows. Epsilon is spent.")
    if OMV in metrics["aggregates"] and "auc" in metrics:
        notes.append(
            "A majority vote of k iterates has only k + 1 levels: use its accuracy, "
            "not its AUC."
        )
    return notes


def _of_evaluation(found: dict[str, Any]) -> list[str]:
    share = found["larger_losses"]
    how_many = "" if share is None else f", those of {share:.2%} of the rows,"
    return [
        "Metrics and intervals include noise. Losses above "
        f"{found['largest_loss']:.3g}{how_many} count as it."
    ]
