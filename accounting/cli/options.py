"""Types of options that several commands have.

Public: everything.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from accounting.core import deltas, sampler_registry
from accounting.core.neighboring_relation import RELATIONS
from accounting.core.settings import OUTPUT, RARE, OfPrivacy, one_of
from accounting.core.validation import InputError, check_local

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _size(type_: Any, tokens: Sequence[Any]) -> int:
    """Returns the number of bytes of a text such as 2GiB, 512MiB or 1000000."""
    del type_
    (token,) = tokens
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", token.value.lower())
    if not match:
        raise InputError(f"Expected {token.keyword} {token.value} to be such as 2GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def _here(type_: Any, tokens: Sequence[Any]) -> pathlib.Path | str:
    """Returns a path, in the type of the option; refuses the URL of a store."""
    (token,) = tokens
    check_local(token.keyword or "the path", token.value)
    return token.value if type_ is str else pathlib.Path(token.value)


def _place(type_: Any, tokens: Sequence[Any]) -> pathlib.Path | str:
    """Returns a path, or the URL of a folder in a store as it is."""
    del type_
    (token,) = tokens
    return token.value if "://" in token.value else pathlib.Path(token.value)


def _upper(type_: Any, tokens: Sequence[Any]) -> str:
    """Returns a name in capitals."""
    del type_
    return str(tokens[0].value).upper()


def number_or_auto(text: str) -> float | str:
    """Returns a number, or "auto"; raises ValueError for another text."""
    return text if text == "auto" else float(text)


#: A file of options, which is read before the command runs.
Config = Annotated[
    pathlib.Path | None,
    Parameter(
        converter=_here,
        help="TOML file of options, such as learning_rate = 0.1; those given here "
        "count.",
    ),
]
Json = Annotated[
    bool, Parameter(name="--json", group=OUTPUT, help="JSON on standard output.")
]
LocalPath = Annotated[pathlib.Path, Parameter(converter=_here)]
LocalText = Annotated[str, Parameter(converter=_here, n_tokens=1)]
Place = Annotated[pathlib.Path | str, Parameter(converter=_place, n_tokens=1)]
Plot = Annotated[pathlib.Path | None, Parameter(converter=_here, group=OUTPUT)]
Size = Annotated[int, Parameter(converter=_size, metavar="SIZE")]
Sampler = Annotated[str, one_of("sampler", sampler_registry.names)]
Relation = Annotated[
    str,
    Parameter(converter=_upper, metavar="RELATION"),
    one_of("relation", lambda: tuple(RELATIONS)),
]
Cap = Annotated[int | Literal["auto"], Parameter(show=False)]
Bands = Annotated[int | Literal["auto"] | None, Parameter(metavar="K|auto")]
AllowLargeDelta = Annotated[
    bool,
    OfPrivacy,
    RARE,
    Parameter(
        help=f"Accept a delta of {deltas.LARGEST_DELTA} or more, which protects next "
        "to nothing."
    ),
]


def check_delta(delta: float | None, allow_large: bool) -> None:
    """Refuses a delta that protects next to nothing.

    Args:
      delta: The delta; None is accepted.
      allow_large: Whether the user accepts a large one.

    Raises:
      InputError: it is out of range.
    """
    if delta is not None:
        deltas.check(delta, allow_large=allow_large)


def delta_options(delta: float | None, allow_large: bool) -> tuple[str, ...]:
    """Returns the options that pass a delta on; arguments as for `check_delta`."""
    given = () if delta is None else (f"--delta={delta!r}",)
    return (*given, *(("--allow-large-delta",) if allow_large else ()))


def warn(delta: float | None, num_examples: int) -> None:
    """Prints a warning to standard error if ``delta`` is at least 1 / num_examples.

    Args:
      delta: The delta of the claim; None if the user gave none.
      num_examples: Slots of the data set.
    """
    if line := deltas.warning(delta, num_examples):
        print(line, file=sys.stderr)
