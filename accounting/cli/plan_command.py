"""``dpsgd plan``: the noise or epsilon of each sampler, before any work starts."""

from __future__ import annotations

from typing import Annotated

from accounting.cli.command import of_fields
from accounting.cli.options import (
    Json,
    PlanOptions,
    check_delta,
)


def plan(*, asked: Annotated[PlanOptions, of_fields], as_json: Json = False) -> None:
    """Noise (or epsilon) of each sampler, side by side.

    The default relation is zero-out: an example is replaced by a ghost that
    contributes zero.  A lower bound is no guarantee and is never shown as one.

    For example:
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 5 --delta 2.7e-8
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 5 --delta 2.7e-8 --sweep batch-size \\
          --values 4096,16384,65536 --plot noise.png
    """
    check_delta(asked.delta, asked.allow_large_delta)
    from accounting.cli import plan_answers  # after --help: tables, and the accountant

    plan_answers.print_answers(asked, as_json=as_json)
