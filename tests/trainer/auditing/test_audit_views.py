"""Canaries with several views, whose mean gradient is clipped."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.trainer.auditing import audit_run, audit_training
from tests.trainer.auditing.audit_model import CANARY
from tests.trainer.auditing.audit_training import SmallRun
from tests.trainer.auditing.test_audit_users import CLIP, NOISE, PLAN, judged
from trainer.core.step import bounded_sum
from trainer.core.tf_compat import tf
from trainer.gradients.clipping import example_gradients

pytestmark = pytest.mark.usefixtures("weights_alone", "warm_starts")

VIEWS = 3
RUNS = audit_training.small_runs(PLAN, NOISE, CLIP, views=VIEWS)


def test_all_views_of_an_example_are_its_canary(tmp_path: pathlib.Path) -> None:
    audit_run.write_table(tmp_path, RUNS[2], np.ones(RUNS[2].num_canaries, bool))
    column = pq.read_table(tmp_path / "data")[CANARY].to_pylist()
    assert column == [[1 + n] * VIEWS for n in range(RUNS[2].num_canaries)]


@pytest.mark.thorough
@pytest.mark.parametrize("run", RUNS[:2], ids=["dense", "lazy"])
def test_views_that_are_clipped_together_are_consistent(run: SmallRun) -> None:
    """Violated with probability at most 1e-6."""
    verdict = judged(run, 1 - 1e-6)
    assert not verdict.violated, verdict.text


@pytest.mark.thorough
def test_a_clip_of_each_view_by_itself_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = bounded_sum.clipped

    def of_each_view(gradients: Any, **clips: Any) -> Any:
        model = gradients.model
        of_view = honest(example_gradients(model.of_row), **clips)
        return lambda columns, weight: of_view(
            model._rows(columns), tf.repeat(weight, model.size)
        )

    monkeypatch.setattr(bounded_sum, "clipped", of_each_view)
    assert judged(RUNS[0], 0.999).violated
