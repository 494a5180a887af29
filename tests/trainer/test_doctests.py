"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "aggregates",
        "aggregation_commands",
        "aggregation_settings",
        "averaging",
        "lazy_noise",
        "noise",
        "progress",
        "run_record",
        "simulation",
        "tasks",
        "uncertainty",
    ],
)
def test_docstring_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"trainer.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
