"""``dpsgd plan``: what each way of making batches costs, before any work starts."""

from __future__ import annotations

from typing import Any

import click

from accounting import neighboring_relation
from accounting.cli import registered, shared_options


@click.command(name="plan")
@shared_options.num_examples("Slots of the data set.", required=True)
@shared_options.batch_size(
    "Expected examples of a step; gradients are divided by it.", required=True
)
@shared_options.epochs("Rounds over the data.")
@shared_options.num_steps("Steps in all, instead of whole epochs of n/b steps.")
@shared_options.epsilon("Target; the answer is the noise.")
@shared_options.noise_multiplier("Given noise; the answer is epsilon.")
@shared_options.delta("Well below 1/num-examples.", required=True)
@registered.sampler("One or more; all by default.", "samplers", multiple=True)
@shared_options.relation(
    "Which data sets are neighbours; the default is zero-out.",
    default=neighboring_relation.REPLACE_SPECIAL,
    show_default=True,
)
@shared_options.max_examples_per_user(
    "Answer for users with at most so many examples.", default=1, show_default=True
)
@shared_options.truncated_batch_size(
    "Cap on the examples of a step, or the least that costs nothing."
)
@click.option(
    "--sweep",
    type=click.Choice(("batch-size", "epsilon", "epochs")),
    help="Vary one thing, and show where the order of the samplers flips.",
)
@shared_options.as_json
@shared_options.plot("Also draw it, e.g. a.png.")
def plan_command(**flags: Any) -> None:
    """Noise (or epsilon) of each way of making batches, side by side.

    Answers are for the zero-out relation: an example is replaced by a ghost that
    contributes zero.  For others, samplers that are not accounted for are left out, or
    refused if asked for.  A lower bound is no guarantee and is never shown as one.

    \b
    Example, one epoch of 36.8 million examples at epsilon 5:
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 5 --delta 2.7e-8
    """
    from accounting.cli import plan_answers  # after --help: tables, and the accountant

    plan_answers.print_answers(flags)
