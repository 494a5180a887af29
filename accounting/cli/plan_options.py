"""The options of ``dpsgd plan``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from cyclopts import Parameter

from accounting.cli.options import (
    AllowLargeDelta,
    Bands,
    Cap,
    Plot,
    Relation,
)
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.sampler_registry import names
from accounting.core.settings import RARE, OfPrivacy, listed
from accounting.core.validation import check_choice

Numbers = Annotated[tuple[float, ...] | None, listed(float)]
Integers = Annotated[tuple[int, ...] | None, listed(int)]
Samplers = Annotated[
    tuple[str, ...], listed(lambda text: check_choice("sampler", text, names()))
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
      runs: Also the price of tuning with N runs: all of them shown, or only the best.
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
