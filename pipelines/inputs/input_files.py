"""Finds the files of an input: a file, a folder or a glob, local or in a store.

As in Spark, pandas, DuckDB and Hive, a folder stands for the visible files below it, at
any depth.  A file is hidden if its name, or that of a folder above it, begins with a
dot or an underscore; a partition folder such as ``_day=3`` is visible.

Formal guarantees:
  - Every visible file of a folder is returned.  A file with another suffix, an entry
    that is not a file, a broken link, and a folder that cannot be listed are errors
    that name it.
  - Hidden files are not returned, but their names are.  A glob matches a hidden file
    only if it spells the dot or underscore.
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
import fnmatch
import glob
import os
import pathlib
import re
import shlex
import stat

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
    """A pattern, split into parts, below a folder without wildcards.

    Attributes:
      option: The command-line option, for messages.
      text: The value of the option.
      root: The folder.
      parts: Parts of the pattern; empty if ``text`` names one file.
      suffix: Required suffix of every matching file.
    """

    option: str
    text: str
    root: str
    parts: tuple[str, ...]
    suffix: str

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
            raise _nothing(query, found)
        if not partitions:
            _check_partitions(query, found)
        _check_suffix(query, found)
        if not is_remote(query.root):
            _check_files(query, found)
    except OSError as error:
        typed = pattern[: _end_of_folder(pattern)]
        place = _place(str(error.filename or pattern), typed)
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
    if not query.parts:
        return
    root, file = (os.path.realpath(path) for path in (query.root or ".", out))
    below = os.path.relpath(os.path.join(file, *names), root).split(os.sep)
    if below[0] != os.pardir and () in _follow(query.parts, tuple(below))[0]:
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
    has_wildcard = re.search(_WILDCARDS, text) is not None
    literal = not has_wildcard or (not is_remote(text) and os.path.lexists(text))
    if literal and storage.is_folder(text):
        return _Query(option, text, text, (_ANY_FOLDERS, "*"), suffix)
    if literal:
        return _Query(option, text, text, (), "")
    cut = _end_of_folder(text)
    parts = tuple(part for part in text[cut:].split("/") if part not in ("", "."))
    return _Query(option, text, text[:cut], parts, "")


def _end_of_folder(text: str) -> int:
    """Returns where the folder of a glob ends; the length of a path without one."""
    wildcard = re.search(_WILDCARDS, text)
    return text.rfind("/", 0, wildcard.start()) + 1 if wildcard else len(text)


def _match(query: _Query) -> Found:
    if not query.parts:
        name = query.root.rsplit("/", 1)[-1]
        there = storage.exists(query.root)
        return Found(files=((query.root, name),) if there else ())
    hidden: set[str] = set()

    def follow(names: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
        rests, cut = _follow(query.parts, names)
        hidden.update(cut)
        return rests

    files = [
        "/".join(names)
        for names in storage.walk(query.root, lambda names: any(follow(names)))
        if () in follow(names)
    ]
    return Found(
        files=tuple((join(query.root, name), name) for name in sorted(files)),
        hidden=tuple(sorted(hidden)),
    )


def _follow(
    parts: tuple[str, ...], names: tuple[str, ...]
) -> tuple[frozenset[tuple[str, ...]], list[str]]:
    """Matches a path against the first parts of a pattern.

    Args:
      parts: Parts of the pattern.
      names: Parts of the path.

    Returns:
      The remaining parts of the pattern, for each way to match; () means that the path
      itself matches.  If a name on the path is hidden, there is no way to match, and
      the second value is the path to that name.
    """
    rests = _or_no_folders({parts})
    for depth, name in enumerate(names, 1):
        matching = {rest for rest in rests if rest and _matches(rest[0], name)}
        if _is_hidden(name):
            written = {rest for rest in matching if rest[0][0] == name[0]}
            if matching and not written:
                return frozenset(), ["/".join(names[:depth])]
            matching = written
        after = {rest if rest[0] == _ANY_FOLDERS else rest[1:] for rest in matching}
        rests = _or_no_folders(after)
    return rests, []


def _or_no_folders(rests: set[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
    """Adds the remaining parts if ``**`` matches no folder."""
    found = set(rests)
    for rest in rests:
        while rest and rest[0] == _ANY_FOLDERS:
            rest = rest[1:]
            found.add(rest)
    return frozenset(found)


def _matches(part: str, name: str) -> bool:
    return part == _ANY_FOLDERS or fnmatch.fnmatchcase(name, part)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _nothing(query: _Query, found: Found) -> InputError:
    hidden = ""
    if found.hidden:
        hidden = f" except hidden ones such as {without_values(found.hidden[0])}"
    return InputError(
        f"Expected files at {query.option} {query.text}; there are none{hidden}."
    )


def _check_partitions(query: _Query, found: Found) -> None:
    """Refuses folders such as ``key=value``, unless the pattern spells ``key=``."""
    for _, name in found.files:
        above = name.split("/")[:-1]
        keys = [folder.split("=")[0] + "=" for folder in above if "=" in folder]
        if all(any(part.startswith(key) for part in query.parts) for key in keys):
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
    suffix = query.suffix
    if len(others) == len(found.files):
        suffix = pathlib.PurePosixPath(others[0]).suffix
    place = _place(join(query.root, others[0]), query.root)
    raise InputError(
        f"Expected {place} to be a {query.suffix} file: every "
        f"visible file of a folder is read. Move it away, or give "
        f"{query.glob(_ANY_FOLDERS, f'*{suffix}')}."
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
