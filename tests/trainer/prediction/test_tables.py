"""What ``trainer.prediction.predict`` guarantees about raw tables."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.tables.schema import Schema
from trainer.prediction.predict import open_rows


@dataclasses.dataclass
class SomeManifest:
    """What a manifest says about the data set."""

    dataset: dict[str, Any]


def test_a_run_whose_cells_were_read_in_another_way_reads_no_raw_table(
    tmp_path: pathlib.Path,
) -> None:
    columns = {"a": {"kind": "category"}, "y": {"kind": "label", "task": "binary"}}
    description = Schema.from_json({"version": 1, "columns": columns}).description
    table = tmp_path / "new.csv"
    table.write_text("a\nx\n")
    rows = open_rows(table, SomeManifest(description), ())  # type: ignore[arg-type]
    assert rows.unit == "byte"
    earlier = {**description, "cells": "dpsgd-cells-v1"}
    with pytest.raises(InputError, match=r"cells dpsgd-cells-v3; .*train again"):
        open_rows(table, SomeManifest(earlier), ())  # type: ignore[arg-type]
