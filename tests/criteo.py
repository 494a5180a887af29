"""Criteo's schema with other numbers of ids, for small tests."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from pipelines.tables.schema import Schema


def criteo_schema(
    buckets: int | Sequence[int] = 1024, shares: Sequence[int] = (80, 10, 10)
) -> Schema:
    """The schema ``criteo`` with so many ids of each category, or of all."""
    fields = Schema.read("criteo").to_json()
    sizes = [buckets] * 26 if isinstance(buckets, int) else buckets
    for number, size in enumerate(sizes, start=1):
        fields["columns"][f"C{number}"]["buckets"] = size
    fields["split"]["shares"] = list(shares)
    return Schema.from_json(fields)


def described(buckets: int | Sequence[int]) -> dict[str, Any]:
    """The description of data that ``criteo_schema`` prepares."""
    return criteo_schema(buckets).description


def write_schema(path: pathlib.Path, buckets: int) -> pathlib.Path:
    """Writes the schema ``criteo`` with so many ids of each category."""
    root = pathlib.Path(__file__).parents[1]
    text = (root / "pipelines" / "tables" / "criteo.toml").read_text()
    path.write_text(text.replace("buckets = 1024", f"buckets = {buckets}"))
    return path
