"""The flags of ``dpsgd plan`` that show ModelMix beside DP-SGD, and their theorems.

Public: everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from accounting.cli import shared_options
from accounting.cli.number_lists import NumberList
from accounting.core.validation import InputError

if TYPE_CHECKING:
    from accounting.core.claim import Theorem

#: Adds the flags to a command.
options = shared_options.together(
    click.option(
        "--mix-width",
        type=NumberList(float, example="0.075,0.15"),
        metavar="TAU1,TAU2,...",
        help="Also show ModelMix, with these mixing widths over the learning rate.",
    ),
    click.option(
        "--linf-factor",
        type=NumberList(int, example="1,100"),
        metavar="P1,P2,...",
        help="Clip of ModelMix's coordinates: the clip norm over the square root of P; "
        "1 by default.",
    ),
    shared_options.l2_norm_clip("Clip norm of ModelMix, the unit of its widths."),
)


def theorems(flags: Mapping[str, Any]) -> dict[str, Theorem]:
    """Returns label -> theorem, for each width and factor.

    Raises:
      InputError: a value out of range, or a flag without another that it needs.
    """
    widths, factors = flags["mix_width"], flags["linf_factor"]
    clip = flags["l2_norm_clip"]
    for name, given in (("linf-factor", factors), ("l2-norm-clip", clip)):
        if given is not None and widths is None:
            raise InputError(f"Expected --mix-width beside --{name}. Give both.")
    if widths is None:
        return {}
    if clip is None:
        raise InputError("Expected --l2-norm-clip beside --mix-width. Give both.")
    from accounting.claims.model_mix.theorem import (
        Mixing,  # after --help: it loads scipy
    )

    return {
        f"ModelMix {width:g}, p={factor}": Mixing(
            mix_width=width, l2_norm_clip=clip, linf_factor=factor
        )
        for factor in factors or (1,)
        for width in widths
    }
