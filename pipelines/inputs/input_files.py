"""Finds the files of an input: a file, a folder or a glob, local or in a store.

As in Spark, pandas, DuckDB and Hive, a folder stands for the visible files below it, at
any depth.  A file is hidden if its name, or that of a folder above it, begins with a
dot or an underscore; a partition folder such as ``_day=3`` is visible.

Formal guarantees:
  - Every visible file of a folder is returned.  A file with another suffix, an entry
    that is not a file, a broken link, and a folder that cannot be listed are errors
    that name it.
  - Hidden files are not returned, but their names are, unless a part of a glob begins
    with the same dot or underscore.
  - ``**`` in a glob matches any number of folders, including none.
  - No local file is returned twice, whatever links lead to it: otherwise each of its
    rows would be two examples, and the stated epsilon false.
  - A partition folder such as ``day=3`` is refused, because the column ``day`` is only
    in its name, unless the pattern spells ``day=``.

Public: paths and names.  Sensitive: values of partition columns, which may be ids; no
error about a partition quotes them.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import pathlib
import re
import shlex
import stat

from fsspec.utils import glob_translate

from accounting.core.validation import InputError
from pipelines.files import storage
from pipelines.files.paths import is_remote, join

_ANY_FOLDERS = "**"
_WILDCARDS = r"[*?\[]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The files of an input.

    Attributes:
      files: (path, name relative to the input) of each, in the order of the names.
      hidden: Names of the hidden files and folders that were skipped.
    """

    files: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Query:
    """A pattern below a folder without wildcards.

    Attributes:
      option: The command-line option, for messages.
      text: The value of the option.
      root: The folder, or the file.
      pattern: Pattern of the names below it; empty if ``text`` names one file.
      suffix: Required suffix of every matching file.
    """

    option: str
    text: str
    root: str
    pattern: str
    suffix: str = ""

    @functools.cached_property
    def _matches(self) -> re.Pattern[str]:
        return re.compile(glob_translate(self.pattern))

    def hidden(self, name: str) -> str:
        """Returns the path to the first hidden name of a path; empty if there is none.

        A name is not hidden if the pattern spells its dot or underscore.
        """
        spelled = {part[:1] for part in self.pattern.split("/")}
        parts = name.split("/")
        for depth, part in enumerate(parts, 1):
            is_hidden = part[0] == "." or (part[0] == "_" and "=" not in part)
            if is_hidden and part[0] not in spelled:
                return "/".join(parts[:depth])
        return ""

    def may_hold(self, folder: str) -> bool:
        """Whether names below a folder may match."""
        is_deep = folder.count("/") >= self.pattern.count("/")
        return _ANY_FOLDERS in self.pattern or not is_deep

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a name, which may be hidden."""
        return self._matches.match(name) is not None

    def glob(self, *parts: str) -> str:
        """Returns the option with another pattern below the same folder."""
        return f"{self.option} {shlex.quote(join(glob.escape(self.root), *parts))}"


def find_files(
    pattern: str,
    *,
    suffix: str = ".parquet",
    option: str = "--input",
    partitions: bool = False,
) -> Found:
    """Returns the files that ``pattern`` stands for.

    Args:
      pattern: A file, a folder or a glob.
      suffix: Required suffix of the files in a folder.
      option: The command-line option of ``pattern``, for messages.
      partitions: Whether the caller reads the columns in the names of folders.

    Raises:
      InputError: there is no file, or one that the guarantees above refuse.
    """
    try:
        query = _query(pattern, suffix, option)
        found = _match(query)
        if not found.files:
            hidden = found.hidden[:1]
            told = "".join(
                f" except hidden ones such as {without_values(each)}" for each in hidden
            )
            raise InputError(
                f"Expected files at {option} {pattern}; there are none{told}."
            )
        if not partitions:
            _check_partitions(query, found)
        _check_suffix(query, found)
        if not is_remote(query.root):
            _check_files(query, found)
    except OSError as error:
        place = _place(str(error.filename or pattern), _folder_of(pattern))
        raise InputError(
            f"Expected {place} of {option} to be readable: "
            f"{error.strerror or type(error).__name__}."
        ) from None
    return found


def check_outside(pattern: str, out: str, *names: str) -> None:
    """Refuses an output that is part of the input: it would be read the next time.

    Args:
      pattern: ``--input``: a file, a folder or a glob.
      out: ``--out``: a file or a folder.
      *names: Path of a file in that folder.

    Raises:
      InputError: the pattern stands for that file.
    """
    if is_remote(pattern) or is_remote(out):
        return
    query = _query(pattern, "", "--input")
    root, file = (os.path.realpath(path) for path in (query.root or ".", out))
    below = os.path.relpath(os.path.join(file, *names), root)
    is_below = query.pattern and below.split(os.sep)[0] != os.pardir
    if is_below and query.matches(below) and not query.hidden(below):
        raise InputError(
            f"Expected --out {out} not to lie in {query.option} {pattern}, which would "
            "be read with it the next time. Choose a place outside of it."
        )


def without_values(name: str) -> str:
    """Returns a path without the values of partition columns, which may be of users.

    Example:
      >>> without_values("user=ann/day=3/part.parquet")
      'user=*/day=*/part.parquet'
    """
    return re.sub(r"=[^/]*/", "=*/", name)


def _place(path: str, root: str) -> str:
    """Returns a path for messages: what the user typed, and names without values.

    Args:
      path: Path of a file, a folder or a link, which may itself be a partition.
      root: Folder or glob that the user typed.
    """
    typed = root if path.startswith(root) else ""
    return typed + without_values(f"{path.removeprefix(typed)}/")[:-1]


def _query(text: str, suffix: str, option: str) -> _Query:
    root = _folder_of(text)
    if root == text or (not is_remote(text) and os.path.lexists(text)):
        is_folder = storage.is_folder(text)
        pattern = f"{_ANY_FOLDERS}/*" if is_folder else ""
        return _Query(option, text, text, pattern, suffix if is_folder else "")
    parts = text.removeprefix(root).split("/")
    if any(_ANY_FOLDERS in part and part != _ANY_FOLDERS for part in parts):
        raise InputError(
            f"Expected ** in {option} {text} to stand for whole folders, as in a/**/b."
        )
    pattern = "/".join(part for part in parts if part not in ("", "."))
    return _Query(option, text, root, pattern)


def _folder_of(text: str) -> str:
    """Returns the folder of a glob; a path without wildcards as it is."""
    wildcard = re.search(_WILDCARDS, text)
    return text[: text.rfind("/", 0, wildcard.start()) + 1] if wildcard else text


def _match(query: _Query) -> Found:
    if not query.pattern:
        name = query.root.rsplit("/", 1)[-1]
        there = storage.exists(query.root)
        return Found(files=((query.root, name),) if there else ())
    hidden: set[str] = set()

    def is_visible(name: str) -> bool:
        found = query.hidden(name)
        hidden.update([found] if found else [])
        return not found

    files = [
        name
        for name in storage.walk(
            query.root, lambda folder: query.may_hold(folder) and is_visible(folder)
        )
        if query.matches(name) and is_visible(name)
    ]
    return Found(
        files=tuple((join(query.root, name), name) for name in sorted(files)),
        hidden=tuple(sorted(hidden)),
    )


def _check_partitions(query: _Query, found: Found) -> None:
    """Refuses folders such as ``key=value``, unless the pattern spells ``key=``."""
    for _, name in found.files:
        above = name.split("/")[:-1]
        keys = [folder.split("=")[0] + "=" for folder in above if "=" in folder]
        if all(f"/{key}" in f"/{query.pattern}" for key in keys):
            continue
        folders = [f"{key}*" for key in keys]
        files = f"*{pathlib.PurePosixPath(name).suffix}"
        between = f"/{_ANY_FOLDERS}/"
        wanted = between.join([_ANY_FOLDERS, *folders, files])
        raise InputError(
            f"Expected no partition folders {'/'.join(folders)} in {query.option} "
            f"{query.text}: a column that is only in their names is not read. "
            f"`dpsgd schema {shlex.quote(query.text)}` and then `dpsgd prepare --input "
            f"{shlex.quote(query.text)} --schema schema.toml --out data` write it into "
            f"the files, as a number; or leave it out with {query.glob(wanted)}."
        )


def _check_suffix(query: _Query, found: Found) -> None:
    """Refuses a folder with a visible file of another suffix."""
    others = [name for _, name in found.files if not name.endswith(query.suffix)]
    if not others:
        return
    place = _place(join(query.root, others[0]), query.root)
    raise InputError(
        f"Expected {place} to be a {query.suffix} file: every "
        f"visible file of a folder is read. Move it away, or give "
        f"{query.glob(_ANY_FOLDERS, f'*{query.suffix}')}."
    )


def _check_files(query: _Query, found: Found) -> None:
    """Refuses what is not a local file, and a file under two names."""
    seen: dict[object, str] = {}
    for path, _ in found.files:
        shown = _place(path, query.root)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise InputError(
                f"Expected {shown} of {query.option} to lead to a file; it is a link "
                "to nothing. Restore the file, or remove the link."
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                f"Expected {shown} of {query.option} to be a file. Move it away."
            )
        # Some file systems report inode 0 for every file.
        known = (status.st_dev, status.st_ino) if status.st_ino else None
        first = seen.setdefault(known or os.path.realpath(path), path)
        if first != path:
            raise InputError(
                f"Expected every file of {query.option} once; "
                f"{_place(first, query.root)} and {shown} are the same file. Remove "
                "the link."
            )
