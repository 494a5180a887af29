"""Types of the options that take paths: of this machine, or also of a store.

Public: everything.
"""

from __future__ import annotations

import pathlib
from typing import Any

import click

from accounting.core.validation import check_local


class Local(click.Path):
    """A path of this machine; the URL of a store is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Returns a path.

        Args:
          value: What was given.
          param: The option or the argument.
          ctx: Context of the command.

        Raises:
          InputError: the URL of a store.
        """
        assert param is not None  # given by click
        is_option = isinstance(param, click.Option)
        check_local(param.opts[0] if is_option else param.human_readable_name, value)
        return super().convert(value, param, ctx)


class Place(click.Path):
    """A path of this machine, or the URL of a file or folder in a store."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Returns a path, or the URL as it is; arguments as for ``Local.convert``."""
        return value if "://" in str(value) else super().convert(value, param, ctx)


#: A text that the work checks: a file, a folder, or a pattern.
TEXT = Local(readable=False)
TEXT_OR_URL = Place(readable=False)
PATH = Local(path_type=pathlib.Path)
FILE = Local(dir_okay=False, path_type=pathlib.Path)
FOLDER = Local(file_okay=False, path_type=pathlib.Path)
FOLDER_OR_URL = Place(file_okay=False, path_type=pathlib.Path)
