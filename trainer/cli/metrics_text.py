"""The metrics of a run and of its averages, as text."""

from __future__ import annotations

from typing import Any

from trainer.model.metrics import in_words, metric_names
from trainer.settings.aggregation_settings import (
    MEANINGS,
    OMV,
)


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
