"""The flags for averages, and the printed table."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner

from trainer.cli.commands import train_command
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


@pytest.mark.usefixtures("lean_results")
def test_all_flags_reach_the_run_and_its_table(
    tmp_path: pathlib.Path, small_batches: Any, held_out: pathlib.Path
) -> None:
    arguments = [
        f"--batches={small_batches.path}", f"--eval={held_out}",
        f"--out={tmp_path / 'run'}", "--l2-norm-clip=1", "--noise-multiplier=1",
        "--hidden=4", "--embedding-dim=2", "--ema-decay=0.9", "--tail=2",
        "--train-over=uta", "--aggregate-from=3", "--keep-last=2", "--keep-every=4",
        "--keep-decay=0.5", "--export=upa", "--export=past_ema", "--uncertainty=0.9",
    ]  # fmt: skip
    result = CliRunner().invoke(train_command, arguments)
    assert result.exception is None, result.output
    for name in ("last iterate", "ema:", "uta:", "past_ema:", "upa:", "opa:", "omv:"):
        assert f"\n{name}" in result.output
    run = tmp_path / "run"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["uncertainty"]["steps"] == [6, 10]
    assert metrics["uncertainty"]["level"] == 0.9
    assert (run / "past_ema_model.keras").exists()
    record = json.loads((run / "run_record.json").read_text())
    assert record["optimizer"]["train_over"] == "uta"
    assert record["optimizer"]["aggregate_from"] == 3
