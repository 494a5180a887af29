"""What ``dpsgd prepare`` asks and tells of a table with a column of kind user."""

from __future__ import annotations

from typing import Any

from accounting.core.validation import InputError
from pipelines.tables.bounding import BoundSettings
from pipelines.tables.prepare import PrepareSummary, TableOptions, UserOptions

_NEEDED = ("max_examples_per_user", "num_examples")
_FLAGS = (*_NEEDED, "sampled", "bound_held_out", "key_file", "memory_limit")


def take(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the flags about users from ``options`` and returns them."""
    return {name: options.pop(name) for name in _FLAGS if name in options}


def users_of(prepared: TableOptions, flags: dict[str, Any]) -> UserOptions | None:
    """Returns how users are bounded; None if the table has none.

    Args:
      prepared: Options of the table.
      flags: Flags about users, by name.

    Raises:
      InputError: flags without a column of users, or missing flags.
    """
    user = prepared.schema.user
    if not user:
        if not flags:
            return None
        flag = next(iter(flags)).replace("_", "-").replace("sampled", "sample")
        raise InputError(
            f"Expected no --{flag} without a column of users. "
            f"Leave it out, or name the column of ids by --user."
        )
    missing = [name.replace("_", "-") for name in _NEEDED if name not in flags]
    if missing:
        raise InputError(
            f"Expected --{' and --'.join(missing)} beside column {user} of kind user, "
            "such as --max-examples-per-user 5 --num-examples NUMBER: they bound the "
            "rows kept of a user and of all, for training. NUMBER is public; of ten "
            "times the rows that are kept, batches hold a tenth of --batch-size. Give "
            'both, or write kind = "drop" in the schema.'
        )
    names = [name for name in (*_NEEDED, "sampled") if name in flags]
    settings = BoundSettings(
        user_column=user, **{name: flags.pop(name) for name in names}
    )
    return UserOptions(settings=settings, **flags)


def without_counts(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns a summary without sizes that depend on how many rows each user has."""
    counts = ("rows", "rows_per_second", "malformed_lines", "first_malformed_lines")
    return {name: value for name, value in summary.items() if name not in counts}


def shown(out: str, settings: BoundSettings, summary: PrepareSummary) -> dict[str, Any]:
    """Returns a summary of bounded users, which holds no counts of their rows.

    Args:
      out: The folder.
      settings: How users were bounded.
      summary: Summary of the whole table.
    """
    return {
        "out": out,
        "unit_of_privacy": "user",
        "an_example_is": settings.sampled.removesuffix("s"),
        "max_examples_per_user": settings.max_examples_per_user,
        "num_examples": settings.num_examples,
        "input_files": summary.num_files,
        "columns_left_out": [settings.user_column, *summary.left_out],
    }
