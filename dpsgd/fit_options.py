"""The options of ``dpsgd fit``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from cyclopts import Parameter

from accounting.cli.command import resolved
from accounting.cli.options import AllowLargeDelta, LocalText
from accounting.core.plan import MOST_RUNS
from accounting.core.settings import RARE, Field, OfPrivacy
from pipelines.cli.data_commands import ColumnOptions


@resolved
@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(ColumnOptions):
    """Options of ``dpsgd fit``.

    Attributes:
      label: Column to predict.
      epsilon: Target epsilon.
      delta: [default: a power of ten, at most 0.1 / training rows]
      schema: Instead of the options on columns: see dpsgd schema.
      rows_are_independent: Declare that no person has several rows: needed without
        --user.
      max_examples_per_user: With --user: rows kept per person.
      num_examples: With --user: public bound on the rows kept for training.
      on_bad_row: Malformed rows: refuse the table, or omit them.  [default: fail]
      batch_size: [default: the power of two nearest to twice the root of the training
        rows]
      epochs: [default: for 500 steps, but at most 8]
      bands: Banded noise of so many bands: see dpsgd batches.  [default: by the rule,
        or 1 in a search, for rows of a user, and for what needs independent noise]
      train: Options for dpsgd train, such as "--hidden 32 --ema-decay 0.99".
      runs: Search as well as N runs would, and keep the best alone: see dpsgd tune.
        --train says by lists and --or what is tried; by default the defaults of dpsgd
        train, and three learning rates.
      of_runs: Noise for so many such fits of this table together, declared before the
        first: each in a folder of its own, by the same plan and split.
      dry_run: End after the noise and the time that steps would take, before any
        sampling.
      out: New folder, or that of the same choices.  [default: TABLE-fit]
      table: The table.
    """

    epsilon: Annotated[float | None, OfPrivacy] = None
    delta: Annotated[float | None, OfPrivacy] = None
    allow_large_delta: AllowLargeDelta = False
    schema: LocalText | None = None
    rows_are_independent: bool = False
    max_examples_per_user: Annotated[int | None, Field(ge=1), RARE] = None
    num_examples: Annotated[int | None, Field(ge=1), RARE] = None
    on_bad_row: Annotated[Literal["fail", "skip"] | None, RARE] = None
    batch_size: Annotated[int | None, Field(ge=1), RARE] = None
    epochs: Annotated[int | None, Field(ge=1), RARE] = None
    bands: Annotated[int | None, Field(ge=1), Parameter(metavar="K"), RARE] = None
    train: Annotated[
        str, Parameter(metavar="OPTIONS", allow_leading_hyphen=True), RARE
    ] = ""
    runs: Annotated[int | None, Parameter(metavar="N"), RARE] = None
    of_runs: Annotated[int, Field(ge=1, le=MOST_RUNS), Parameter(metavar="N"), RARE] = 1
    dry_run: Annotated[bool, RARE] = False
    out: LocalText | None = None
    table: Annotated[str, Parameter(parse=False)] = ""
