"""Tables of public values that commands print on standard output."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table


def format_size(num_bytes: float) -> str:
    """Returns a number of bytes in readable units.

    Example:
      >>> format_size(3 << 20)
      '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def show(title: str, fields: dict[str, Any], as_json: bool) -> None:
    """Prints fields as JSON, or as a table with one line per field.

    Args:
      title: Title of the table.
      fields: Name -> JSON-serialisable value.
      as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    # Fingerprints go below the table, where they are not wrapped and can be copied.
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if not name.endswith("fingerprint"):
            table.add_row(name.replace("_", " "), _for_people(name, value))
    Console(markup=False).print(table)
    for name, value in fields.items():
        if name.endswith("fingerprint"):
            print(f"{name.replace('_', ' ')}: {value}")


def _for_people(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_for_people('', v)}" for key, v in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if "bytes" in name.split("_"):
        return format_size(value)
    if name.endswith("padding"):
        return f"{value:.1%}"
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return "none" if value is None else str(value)
