"""Types of options that several commands have, and the options of ``dpsgd plan``.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from accounting.core import sampler_registry
from accounting.core.neighboring_relation import RELATIONS, REPLACE_SPECIAL
from accounting.core.settings import OUTPUT, RARE, OfPrivacy, listed, one_of
from accounting.core.validation import (
    LARGEST_DELTA,
    InputError,
    check_choice,
    check_claimed_delta,
    check_local,
    delta_warning,
)

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
        help=f"Accept a delta of {LARGEST_DELTA} or more, which protects next "
        "to nothing."
    ),
]


def check_delta(delta: float | None, allow_large: bool) -> None:
    """Refuses a delta that protects next to nothing.

    Args:
      delta: The delta; None is accepted.
      allow_large: Whether the user accepts a large one.

    Raises:
      InputError: the delta is out of range.
    """
    if delta is not None:
        check_claimed_delta(delta, allow_large=allow_large)


def delta_options(delta: float | None, allow_large: bool) -> tuple[str, ...]:
    """Returns the options that pass a delta on to another command.

    Args:
      delta: The delta; None is accepted.
      allow_large: Whether the user accepts a large one.
    """
    given = () if delta is None else (f"--delta={delta!r}",)
    return (*given, *(("--allow-large-delta",) if allow_large else ()))


def warn(delta: float | None, num_examples: int) -> None:
    """Prints a warning to standard error if ``delta`` is at least 1 / num_examples.

    Args:
      delta: The delta of the claim; None if the user gave none.
      num_examples: Slots of the data set.
    """
    if line := delta_warning(delta, num_examples):
        print(line, file=sys.stderr)


# -- dpsgd plan ------------------------------------------------------------------------

Numbers = Annotated[tuple[float, ...] | None, listed(float)]
Integers = Annotated[tuple[int, ...] | None, listed(int)]
Samplers = Annotated[
    tuple[str, ...],
    listed(lambda text: check_choice("sampler", text, sampler_registry.names())),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of ``dpsgd plan``.

    Attributes:
      num_examples: Slots of the data set.
      batch_size: Expected examples per step; gradients are divided by it.
      delta: Should be well below 1/num-examples.
      epochs: Passes over the data.
      num_steps: Steps in all, in place of --epochs.
      epsilon: Target; the answer is the noise multiplier.
      noise_multiplier: Noise standard deviation over the clip norm; the answer is
        epsilon.
      sampler: One or several, separated by commas; all by default.
      relation: Neighbouring relation; REPLACE_SPECIAL is zero-out.
      max_examples_per_user: Largest number of examples of a user.
      truncated_batch_size: Cap on the examples of a step; auto: the least of negligible
        privacy cost.
      bands: Banded noise of so many groups of examples, whose steps take turns; 1:
        independent noise.  auto: by the rule, for --epsilon.  [default: also auto,
        without --sampler]
      sweep: Vary one parameter.  At given noise the answer is epsilon, or delta in a
        sweep over epsilon.
      values: Values of the swept parameter; needed with --sweep.
      tan: Also show TAN's closed form of epsilon in a sweep at given noise.  A sweep
        over noise-multiplier then holds the total noise: batches grow with the noise.
      also_num_steps: Also show such a sweep at other numbers of steps, with the same
        total noise.
      of_runs: Of so many runs together, each on batches of its own.
      runs: Instead, the price of the best of a search as good as N runs.
      mix_width: Also show ModelMix, with these mixing widths over the learning rate.
      linf_factor: Clip of ModelMix's coordinates: the clip norm over the square root of
        P; 1 by default.
      l2_norm_clip: Clip norm of ModelMix, the unit of its widths.
      plot: Also draw the lines of --sweep, such as to a.png.
    """

    num_examples: int
    batch_size: int
    delta: Annotated[float, OfPrivacy]
    allow_large_delta: AllowLargeDelta = False
    epochs: int | None = None
    num_steps: int | None = None
    epsilon: Annotated[float | None, OfPrivacy] = None
    noise_multiplier: Annotated[float | None, OfPrivacy] = None
    of_runs: Annotated[int, OfPrivacy, Parameter(metavar="N")] = 1
    max_examples_per_user: Annotated[int, OfPrivacy] = 1
    sampler: Annotated[Samplers, Parameter(metavar="NAME,...")] = ()
    relation: Annotated[Relation, RARE] = REPLACE_SPECIAL
    truncated_batch_size: Cap = "auto"
    bands: Annotated[Bands, RARE] = None
    sweep: Annotated[
        Literal[
            "batch-size", "epsilon", "epochs", "delta", "noise-multiplier",
            "num-steps", "num-examples", "max-examples-per-user",
        ] | None,
        Parameter(metavar="PARAMETER"),
    ] = None  # fmt: skip
    values: Annotated[Numbers, Parameter(metavar="V1,V2,...")] = None
    tan: Annotated[bool, RARE] = False
    also_num_steps: Annotated[Integers, RARE] = None
    runs: Annotated[int | None, Parameter(metavar="N")] = None
    mix_width: Annotated[Numbers, RARE] = None
    linf_factor: Annotated[Integers, RARE] = None
    l2_norm_clip: Annotated[float | None, RARE] = None
    plot: Plot = None
