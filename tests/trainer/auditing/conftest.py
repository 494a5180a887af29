"""Runs of which an audit reads the weights alone, and those that it is asked about."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from accounting.core.plan import DpSgdPlan
from pipelines.core.users.bounded import BOUNDED, Bounded
from trainer import train
from trainer.auditing import settings_of_run
from trainer.run import privacy
from trainer.settings.requests import AuditSettings


@pytest.fixture
def weights_alone(lean_results: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that write no model, and nothing about averages: no audit reads them."""
    monkeypatch.setattr(train._Run, "_export", lambda run: None)
    monkeypatch.setattr(train._Run, "_finish_averages", lambda run: {})


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AuditSettings]:
    """``settings_of(plan, note, model=model, **given)``: of a run with that record."""
    monkeypatch.setattr(privacy, "check_run", lambda *_, **__: (1.0, 1e-5))

    def make(
        plan: DpSgdPlan, note: Bounded | None = None, *, model: Any = None, **given: Any
    ) -> AuditSettings:
        record: Any = SimpleNamespace(
            method="bam", l2_norm_clip=3.0, model=model or {}, selection={}
        )
        dataset = {} if note is None else {BOUNDED: note.to_json()}
        manifest: Any = SimpleNamespace(plan=plan, dataset=dataset)
        return settings_of_run(record, manifest, **given)

    return make
