"""Fields added to the columns of a schema, which stays as it was written otherwise.

Formal guarantees:
  - the text is the given one with lines added behind the headers of columns, without
    the lines of fields that these replace.

Public: everything.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence

from accounting.core.validation import InputError


def with_fields(
    text: str, fields: Mapping[str, Sequence[str]], *, without: str = ""
) -> str:
    """Returns the text of a schema with lines added to columns.

    Args:
      text: TOML with a header ``[columns.NAME]`` for each column of ``fields``.
      fields: Name of a column -> lines.
      without: Field of these columns that is left out, where it has a line of its own.

    Raises:
      InputError: a column has no header of its own.

    Example:
      >>> with_fields("[columns.age]\\nkind = 'numeric'", {"age": ["log = true"]})
      "[columns.age]\\nlog = true\\nkind = 'numeric'"
    """
    lines, missing, column = [], dict(fields), ""
    for line in text.split("\n"):
        if line.lstrip().startswith("["):
            column = _column_of(line)
        is_left_out = without and line.partition("=")[0].strip() == without
        if column not in fields or not is_left_out:
            lines.append(line)
        lines += missing.pop(_column_of(line), ())
    if missing:
        raise InputError(
            f"Expected a header [columns.{next(iter(missing))}] in the schema, behind "
            "which what is found is written. Write its fields below such a header."
        )
    return "\n".join(lines)


def _column_of(line: str) -> str:
    """Returns the column whose header a line is; empty if it is none."""
    if not line.lstrip().startswith("[columns."):
        return ""
    try:
        (found,) = tomllib.loads(line)["columns"]
    except (tomllib.TOMLDecodeError, ValueError):
        return ""
    return str(found)
