"""A run writes all results, and a statement of what it executed."""

from __future__ import annotations

import itertools
import json
import pathlib
import stat
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.conftest import make_rows, write_held_out
from tests.trainer.run.whole_runs import (
    LINEAR,
    same_results,
    weights_of,
)
from trainer.cli.metrics_text import metrics_text
from trainer.core.run.run_record import read_run
from trainer.report.run_files import RUN_NAMES, exported_names
from trainer.run import privacy
from trainer.settings.aggregation_settings import WEIGHT_AVERAGES
from trainer.settings.train_settings import TrainSettings
from trainer.train import train


def test_a_run_writes_all_results_and_a_statement_of_what_it_executed(
    request_for: Any,
) -> None:
    request = request_for()
    summary = train(request)
    run = request.run
    averages = {*map(exported_names, WEIGHT_AVERAGES)}
    unasked = {
        "certificate.json",
        "iterates",
        "uncertainty.parquet",
        *itertools.chain(*averages),
    }
    assert {path.name for path in run.iterdir()} == set(RUN_NAMES) - unasked
    assert {path.name for path in (run / "private").iterdir()} == {
        "checkpoints",
        "run.id",
    }
    for path in [run / "private", *(run / "private").iterdir()]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    record, manifest = read_run(run)
    assert record.complete
    assert record.num_steps_executed == manifest.plan.num_steps == 10
    statement = privacy.run_statement(record, manifest, delta=None)
    assert statement.to_json() == json.loads((run / "privacy.json").read_text())
    assert statement.to_json() == summary.statement
    metrics = json.loads((run / "metrics.json").read_text())
    points = json.loads((run / "curve.json").read_text())["points"]
    assert [point["step"] for point in points] == list(range(11))
    assert points[-1]["auc"] == metrics["auc"]
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="finished run"):
        train(request)  # which is not replaced


def test_a_run_without_privacy_stops_where_rows_that_train_nothing_are_best(
    lean_results: None,
    one_secret: None,
    request_for: Any,
    crash: Any,
    tmp_path: pathlib.Path,
) -> None:
    """Also after a kill; the rows for the evaluation have no say."""
    fast = TrainSettings(method="non-private", learning_rate=0.2, model=LINEAR)
    whole = request_for("whole", settings=fast)
    train(whole)
    points = json.loads((whole.run / "curve.json").read_text())["points"]
    metrics = json.loads((whole.run / "metrics.json").read_text())
    assert 0 < points[-1]["step"] < 10
    assert points[-1].items() <= metrics.items()
    shown = metrics_text(metrics).splitlines()
    assert any(f"best iterate, step {metrics['step']} " in line for line in shown)
    broken = request_for("broken", settings=fast, checkpoint_every=3)
    crash(broken, 9)
    train(broken)
    assert same_results(whole.run, broken.run)
    others = write_held_out(tmp_path / "others", make_rows(50, seed=5))
    other = request_for("other", settings=fast, held_out=others)
    train(other)
    for left, right in zip(weights_of(whole.run), weights_of(other.run), strict=True):
        np.testing.assert_array_equal(left, right)
