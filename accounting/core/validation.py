"""Checks of values before any work starts, and the error that a user sees.

Messages name the parameter, its value, the bound and the remedy.  They never hold a
row, a key, or a realised batch size.

A mechanism that publishes each example in the clear with probability delta satisfies
(0, delta)-differential privacy.  Of n examples it publishes n * delta on average, so
delta must be well below 1/n: `delta_weakness` warns of a delta of 1/n or more, and
`check_claimed_delta` refuses `LARGEST_DELTA` or more unless the user allows it.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
from collections.abc import Collection, Iterable
from importlib import metadata
from typing import Any

#: Least likeness of a name that was probably misspelt: that of delta to data is 0.67.
_ALIKE = 0.7


class InputError(ValueError):
    """A value or a file that the user can correct.  One line; safe to print."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns a question for the choice that was probably meant; empty if none is near.

    A choice is near if its spelling is alike, or if other tools abbreviate it so: by
    its first letters, as in lr and mse, or by one of its words, as in clip and noise.

    Args:
      name: What was written.
      choices: What could have been meant.
    """
    plain = {_plain(each): each for each in choices}
    wanted = _plain(name)
    found = difflib.get_close_matches(wanted, plain, n=1, cutoff=_ALIKE)
    for each in plain:
        words = each.split("-")
        if wanted in words or wanted == "".join(word[:1] for word in words):
            found.append(each)
    return f" Did you mean {plain[found[0]]}?" if found else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").strip("-")


def _fail(name: str, value: object, bound: str, remedy: str) -> None:
    ending = f" {remedy}" if remedy else ""
    raise InputError(f"Expected {name}={value!r} {bound}.{ending}")


def check_local(name: str, path: str | os.PathLike[str]) -> None:
    """Refuses, by an InputError, the URL of a store for a path of this machine.

    Taken as a path, the URL would name a folder ``s3:`` of this machine.

    Args:
      name: Name of the option.
      path: What was given.
    """
    if "://" in os.fspath(path):
        raise InputError(
            f"Expected {name} {os.fspath(path)} to be a path of this machine; it takes "
            "none of a store. Name one here, and copy what it holds."
        )


def check_int(
    name: str,
    value: int,
    *,
    at_least: int | None = None,
    at_most: int | None = None,
    remedy: str = "",
) -> int:
    """Returns ``value`` if it is an int (not a bool) within the closed bounds.

    Args:
      name: Name of the parameter, for the message.
      value: The value to check.
      at_least: Lower bound, if any.
      at_most: Upper bound, if any.
      remedy: Last sentence of the message.

    Raises:
      InputError: name, value, bound, remedy.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(name, value, "to be an integer", remedy)
    if at_least is not None and value < at_least:
        _fail(name, value, f">= {at_least}", remedy)
    if at_most is not None and value > at_most:
        _fail(name, value, f"<= {at_most}", remedy)
    return value


def check_float(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    finite: bool = True,
    remedy: str = "",
) -> float:
    """Returns ``float(value)`` if it is a number within the bounds; refuses NaN.

    Args:
      name: Name of the parameter, for the message.
      value: The value to check.
      above: Strict lower bound, if any.
      at_least: Lower bound, if any.
      below: Strict upper bound, if any.
      at_most: Upper bound, if any.
      finite: Whether infinity is refused.
      remedy: Last sentence of the message.

    Raises:
      InputError: name, value, bound, remedy.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail(name, value, "to be a number", remedy)
    if math.isnan(value) or (finite and math.isinf(value)):
        _fail(name, value, "to be finite" if finite else "to be a number", remedy)
    if above is not None and not value > above:
        _fail(name, value, f"> {above:g}", remedy)
    if at_least is not None and value < at_least:
        _fail(name, value, f">= {at_least:g}", remedy)
    if below is not None and not value < below:
        _fail(name, value, f"< {below:g}", remedy)
    if at_most is not None and value > at_most:
        _fail(name, value, f"<= {at_most:g}", remedy)
    return float(value)


def check_choice(
    name: str, value: str, choices: tuple[str, ...], *, remedy: str = ""
) -> str:
    """Returns ``value`` if it is one of ``choices``.

    Args:
      name: Name of the parameter, for the message.
      value: The value to check.
      choices: The accepted values.
      remedy: Last sentence of the message.

    Raises:
      InputError: name, value, the choices, remedy.
    """
    if value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        _fail(
            name, value, f"to be one of {', '.join(choices)}", f"{remedy}{hint}".strip()
        )
    return value


#: The least delta that is refused: one example in a hundred could be published.
LARGEST_DELTA = 0.01
#: A remedy for data sets of up to ten million examples.
_USUAL_DELTA = 1e-8


def check_claimed_delta(delta: float, *, allow_large: bool = False) -> float:
    """Returns ``delta`` if a privacy claim may be made at it.

    Args:
      delta: In (0, 1).
      allow_large: Whether to accept ``LARGEST_DELTA`` or more.

    Raises:
      InputError: name, value, bound, remedy.
    """
    check_float("delta", delta, above=0.0, below=1.0)
    if delta >= LARGEST_DELTA and not allow_large:
        raise InputError(
            f"Expected delta={delta!r} < {LARGEST_DELTA}: publishing each example with "
            f"probability delta would be as private. Use --delta {_USUAL_DELTA!r}, or "
            "add --allow-large-delta (in Python allow_large_delta=True)."
        )
    return float(delta)


def delta_weakness(delta: float, num_examples: int) -> str | None:
    """Returns a warning if ``delta`` is at least ``1 / num_examples``, else None.

    Args:
      delta: The delta of the claim.
      num_examples: Slots of the data set.

    Example:
      >>> delta_weakness(1e-8, 600) is None
      True
    """
    if delta < 1 / num_examples:
        return None
    return (
        f"A delta of {delta!r} protects next to nothing: it is not below one over the "
        f"{num_examples:,} examples, and publishing each of them with probability "
        "delta would be as private."
    )


def delta_remedy(num_examples: int) -> str:
    """Returns advice for n examples: a power of ten that is at most 1/(10 n)."""
    delta = float(f"1e-{max(3, len(str(10 * num_examples)))}")
    return f"Use --delta {delta!r} or less."


def delta_warning(delta: float | None, num_examples: int) -> str | None:
    """Returns the text of `delta_weakness` with its remedy as a line to print, or None.

    Args:
      delta: The delta of the claim; None without a claim.
      num_examples: Slots of the data set.
    """
    text = None if delta is None else delta_weakness(delta, num_examples)
    return text and f"warning: {text} {delta_remedy(num_examples)}"


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
