"""Runs of which an audit reads the weights alone."""

from __future__ import annotations

import pytest

from trainer import train


@pytest.fixture
def weights_alone(lean_results: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that write no model, and nothing about averages: no audit reads them."""
    monkeypatch.setattr(train._Training, "_export", lambda run: None)
    monkeypatch.setattr(train._Training, "_finish_averages", lambda run: {})
