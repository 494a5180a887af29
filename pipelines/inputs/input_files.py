"""Finds the files of an input: a file, a folder or a glob, local or in a store.

As in Spark, pandas, DuckDB and Hive, a folder stands for the visible files below it, at
any depth.  A file is hidden if its name, or that of a folder above it, begins with a
dot or an underscore; a partition folder such as ``_day=3`` is visible.  Hidden files
are not returned, unless a part of a glob begins with the same dot or underscore.
``**`` in a glob matches any number of folders, including none.

Every visible file of a folder is returned: a file with another suffix, an entry that is
not a file, a broken link, and a folder that cannot be listed are errors that name it.
No local file is returned twice, whatever links lead to it: otherwise each of its rows
would be two examples, and the stated epsilon false.  A partition folder such as
``day=3`` is refused, because the column ``day`` is only in its name, unless the pattern
spells ``day=``.

Public: paths and names.  Sensitive: values of partition columns, which may be ids; no
error about a partition quotes them.
"""

from __future__ import annotations

import glob
import os
import pathlib
import re
import shlex
import stat
from collections.abc import Iterable, Sequence

from fsspec.utils import glob_translate

from accounting.core.validation import InputError
from pipelines.files import storage
from pipelines.files.storage import is_remote, join

#: Pattern of all files below a folder.
_ALL = "**/*"


def find_files(
    pattern: str, *, suffix: str = ".parquet", option: str = "--input"
) -> list[tuple[str, str]]:
    """Returns the files that ``pattern`` stands for, in the order of their names.

    Args:
      pattern: A file, a folder or a glob.
      suffix: Required suffix of the files in a folder.
      option: The command-line option of ``pattern``, for messages.

    Returns:
      Path of each, and its name relative to the input.

    Raises:
      InputError: there is no file, or one is refused, as the module's docstring says.
    """
    try:
        root, names = _root_and_names(pattern)
        if any("**" in part and part != "**" for part in names.split("/")):
            raise InputError(
                f"Expected ** in {option} {pattern} to be whole folders, as in a/**/b."
            )
        if names:
            found = _listed(root, names)
            files = [(join(root, name), name) for name in found]
        else:
            files = [(root, root.rsplit("/", 1)[-1])] if storage.exists(root) else []
        if not files:
            raise InputError(
                f"Expected files at {option} {pattern}; there are none, except hidden "
                "ones, if any: names that begin with a dot or an underscore."
            )
        _check_partitions(
            [name for _, name in files], f"{option} {pattern}", root, names
        )
        others = [path for path, _ in files if not path.endswith(suffix)]
        if names == _ALL and others:
            raise InputError(
                f"Expected {without_values(others[0])} to be a {suffix} file: every "
                "visible file of a folder is read. Move it away, or give "
                f"{_quoted(option, root, '**', f'*{suffix}')}."
            )
        if not is_remote(root):
            _check_files((path for path, _ in files), option)
    except OSError as error:
        place = without_values(str(error.filename or pattern))
        raise InputError(
            f"Expected {place} of {option} to be readable: "
            f"{error.strerror or type(error).__name__}."
        ) from None
    return files


def without_values(path: str) -> str:
    """Returns a path without the values of partition columns, which may be of users.

    Example:
      >>> without_values("user=ann/day=3/part.parquet")
      'user=*/day=*/part.parquet'
    """
    return re.sub(r"=[^/]*", "=*", path)


def _root_and_names(text: str) -> tuple[str, str]:
    """Returns a folder, and the glob of names below it; none for a single file."""
    wildcard = re.search(r"[*?\[]", text)
    if wildcard is None or (not is_remote(text) and os.path.lexists(text)):
        return text, _ALL if storage.is_folder(text) else ""
    end = text.rfind("/", 0, wildcard.start()) + 1
    parts = [part for part in text[end:].split("/") if part not in ("", ".")]
    return text[:end], "/".join(parts)


def _is_visible(name: str, names: str) -> bool:
    """Whether no part of a path is hidden, but for those that the glob spells."""
    spelled = {part[:1] for part in names.split("/")}
    return not any(
        (part[0] == "." or (part[0] == "_" and "=" not in part))
        and part[0] not in spelled
        for part in name.split("/")
    )


def _listed(root: str, names: str) -> list[str]:
    """Returns the visible files that match."""

    def may_hold(folder: str) -> bool:
        is_deep = folder.count("/") >= names.count("/")
        return ("**" in names or not is_deep) and _is_visible(folder, names)

    matches = re.compile(glob_translate(names)).match
    found = storage.walk(root, may_hold)
    return sorted(n for n in found if matches(n) and _is_visible(n, names))


def _quoted(option: str, root: str, *parts: str) -> str:
    return f"{option} {shlex.quote(join(glob.escape(root), *parts))}"


def _check_partitions(found: Sequence[str], told: str, root: str, names: str) -> None:
    """Refuses folders such as ``key=value``, unless the glob spells ``key=``."""
    for name in found:
        above = name.split("/")[:-1]
        keys = [folder.split("=")[0] + "=" for folder in above if "=" in folder]
        if all(f"/{key}" in f"/{names}" for key in keys):
            continue
        folders = [f"{key}*" for key in keys]
        files = f"*{pathlib.PurePosixPath(name).suffix}"
        wanted = "/**/".join(["**", *folders, files])
        raise InputError(
            f"Expected no partition folders {'/'.join(folders)} in {told}: a column "
            "that is only in their names is not read. Write it into the files; or "
            f"leave it out with {_quoted(told.split()[0], root, wanted)}."
        )


def _check_files(paths: Iterable[str], option: str) -> None:
    """Refuses what is not a local file, and a file under two names."""
    seen: dict[object, str] = {}
    for path in paths:
        shown = without_values(path)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise InputError(
                f"Expected {shown} of {option} to be a file; it is a link to nothing."
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"Expected {shown} of {option} to be a file.")
        # Some file systems report inode 0 for every file.
        known = (status.st_dev, status.st_ino) if status.st_ino else None
        first = seen.setdefault(known or os.path.realpath(path), path)
        if first != path:
            raise InputError(
                f"Expected every file of {option} once; {without_values(first)} and "
                f"{shown} are the same."
            )
