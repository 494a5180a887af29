"""The printed table of metrics."""

from __future__ import annotations

from typing import Any

from trainer.cli.metrics_text import metrics_text

METRICS: dict[str, Any] = {"auc": 0.75, "log_loss": 0.5, "accuracy": 0.8}


def test_the_table_has_a_line_per_aggregate_and_says_what_omv_is() -> None:
    found = {
        **METRICS,
        "aggregates": {
            "ema": {"auc": None, "log_loss": 0.25, "accuracy": 0.9},
            "omv": {"auc": 0.625, "log_loss": None, "accuracy": 0.7},
        },
        "uncertainty": None,
    }
    lines = metrics_text(found).splitlines()
    assert [line.split(":")[0].split("  ")[0] for line in lines[:4]] == [
        "held-out metrics of", "last iterate", "ema", "omv",
    ]  # fmt: skip
    assert [line.split()[-3:] for line in lines[1:4]] == [
        ["0.7500", "0.5000", "0.8000"],
        ["-", "0.2500", "0.9000"],
        ["0.6250", "-", "0.7000"],
    ]
    assert len({line.rfind(".") for line in lines[1:4]}) == 1
    assert "k + 1 levels" in lines[4]
    found["uncertainty"] = {"level": 0.9, "mean_width": 0.0123}
    assert "lower bound" in metrics_text(found).splitlines()[-1]
