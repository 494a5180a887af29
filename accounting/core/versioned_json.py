"""Versioned JSON objects: plans, manifests and run records.

Formal guarantees:
  - JSON of another format or version, or with unknown or missing fields, is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from importlib import metadata
from typing import Any

from accounting.core.validation import InputError


def header(version: int, format_name: str | None = None) -> dict[str, Any]:
    """Returns the fields that identify the format of a JSON object.

    Args:
      version: Version of the format.
      format_name: Name of the format, where files of several formats may be confused.
    """
    named = {} if format_name is None else {"format": format_name}
    return {**named, "version": version}


@functools.cache  # of what is loaded, whatever is installed meanwhile
def installed_version(package: str) -> str:
    """Returns the version of a package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def read_fields(
    value: Any,
    names: Collection[str],
    *,
    kind: str,
    version: int,
    format_name: str | None = None,
    remedy: str = "Use the release that wrote it.",
) -> dict[str, Any]:
    """Returns the fields of a JSON object, without its `header`.

    Args:
      value: The parsed JSON.
      names: Names of the expected fields, without those of the header.
      kind: What the object should be, for messages, such as "plan".
      version: The version that this release writes.
      format_name: As in `header`.
      remedy: Last sentence of the message about another version.

    Raises:
      InputError: another format or version, or unknown or missing fields.
    """
    expected = header(version, format_name)
    if not isinstance(value, dict):
        raise InputError(f"Expected a {kind} to be a JSON object.")
    if format_name is not None and value.get("format") != format_name:
        raise InputError(f'Expected a {kind} with format="{format_name}".')
    if value.get("version") != version:
        raise InputError(
            f"Expected {kind} version={value.get('version')!r} to be {version}. "
            f"{remedy}"
        )
    wrong = set(value) ^ {*names, *expected}
    if wrong:
        raise InputError(
            f"Expected the fields of a {kind}; wrong or missing: "
            f"{', '.join(sorted(wrong))}."
        )
    return {name: value[name] for name in names}
