"""Finished runs, written without training."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.plan import DpSgdPlan
from pipelines.core.batches.manifest import BatchFile, Manifest
from pipelines.core.users import BOUNDED, Bounded
from pipelines.files.storage import pretty_json
from pipelines.tables.schema import Schema
from tests.trainer.conftest import COLUMNS, DATASET, BatchFolder, write_run_folder
from trainer.html_report import page

GUESSING = {"accuracy": 0.7, "auc": 0.5, "log_loss": 0.51}
METRICS = {"accuracy": 0.71, "auc": 0.8125, "log_loss": 0.51234, "num_examples": 300}
POINTS = [
    {"step": 0, "accuracy": 0.5, "auc": None, "log_loss": 0.6931, "num_examples": 300},
    {"step": 300, "accuracy": 0.6, "auc": 0.75, "log_loss": 0.6, "num_examples": 300},
    {"step": 600, **METRICS},
]
AVERAGES = {
    "ema": {"accuracy": 0.72, "auc": 0.82, "log_loss": 0.5, "num_examples": 300},
    "omv": {"accuracy": 0.7, "auc": 0.6, "log_loss": None, "num_examples": 300},
}
PLAN = DpSgdPlan(
    sampler="truncated-poisson",
    num_examples=20_000,
    expected_batch_size=100,
    num_steps=600,
    num_epochs=3,
    truncated_batch_size=200,
)


def of_users(rows: int, *, num_examples: int) -> dict[str, Any]:
    """The description of a data set that `dpsgd prepare` made."""
    bounded = Bounded(
        user_column="user", max_examples_per_user=rows, num_examples=num_examples
    )
    return {**DATASET, BOUNDED: bounded.to_json()}


def of_colours() -> dict[str, Any]:
    """The description of a table whose label has names."""
    classes = ["red", "<green>", "dark blue"]
    columns = {
        "colour": {"kind": "label", "task": "classes", "classes": classes},
        "age": {"kind": "numeric"},
    }
    return Schema.from_json({"version": 1, "columns": columns}).description


MakeRun = Callable[..., pathlib.Path]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes half of the time of a page; of this one nothing is looked at."""
    monkeypatch.setattr(
        page, "plot_curve", lambda _, path, title: path.write_bytes(b"PNG")
    )


@pytest.fixture
def make_run(tmp_path: pathlib.Path) -> MakeRun:
    """``make_run(name="run", plan=PLAN, dataset=DATASET, **record)``."""

    def make(
        name: str = "run",
        *,
        plan: DpSgdPlan = PLAN,
        dataset: dict[str, Any] = DATASET,
        **record: Any,
    ) -> pathlib.Path:
        manifest = Manifest(
            plan=plan,
            columns=COLUMNS,
            physical_batch_size=200,
            batches_id="0" * 32,
            files=(BatchFile(name="b", first_step=0, num_steps=plan.num_steps),),
            dataset=dataset,
        )
        batches = BatchFolder(tmp_path, manifest, [])
        fields = {"target_delta": 1e-6, "noise_multiplier": 0.9, **record}
        run = write_run_folder(tmp_path / name, batches, **fields)
        metrics = {"examples": "held-out", "method": "dp-sgd", **METRICS}
        metrics |= {"aggregates": AVERAGES, "guessing": GUESSING}
        (run / "metrics.json").write_bytes(pretty_json(metrics))
        curve = {"examples": "held-out", "points": POINTS}
        (run / "curve.json").write_bytes(pretty_json(curve))
        return run

    return make
