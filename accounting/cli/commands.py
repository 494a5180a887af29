"""``dpsgd plan``: the noise or epsilon of each sampler, before any work starts."""

from __future__ import annotations

from typing import Any

import click

from accounting.cli import model_mix, registered, shared_options
from accounting.cli.grouped import Grouped
from accounting.cli.number_lists import NumberList
from accounting.core import neighboring_relation


@click.command(name="plan", cls=Grouped)
@shared_options.num_examples("Slots of the data set.", required=True)
@shared_options.batch_size(
    "Expected examples per step; gradients are divided by it.", required=True
)
@shared_options.epochs("Passes over the data.")
@shared_options.num_steps("Steps in all, in place of --epochs.")
@shared_options.epsilon("Target; the answer is the noise multiplier.")
@shared_options.noise_multiplier(
    "Noise standard deviation over the clip norm; the answer is epsilon."
)
@shared_options.delta("Should be well below 1/num-examples.", required=True)
@registered.sampler("May be repeated; all by default.", "samplers", multiple=True)
@shared_options.relation(
    "Neighbouring relation; REPLACE_SPECIAL is zero-out.",
    default=neighboring_relation.REPLACE_SPECIAL,
    show_default=True,
)
@shared_options.max_examples_per_user(
    "Largest number of examples of a user.", default=1, show_default=True
)
@shared_options.truncated_batch_size(
    "Cap on the examples of a step; auto: the least of negligible privacy cost."
)
@shared_options.bands_or_auto(
    "Also of cyclic samplers, with so many groups of examples, for noise of so many "
    "bands; auto: by the rule, for --epsilon."
)
@click.option(
    "--sweep",
    type=click.Choice(
        (
            "batch-size", "epsilon", "epochs", "delta", "noise-multiplier",
            "num-steps", "num-examples", "max-examples-per-user",
        )
    ),
    help="Vary one parameter.  At given noise the answer is epsilon, or delta in a "
    "sweep over epsilon.",
)  # fmt: skip
@click.option(
    "--values",
    type=NumberList(float, example="1,2,4"),
    metavar="V1,V2,...",
    help="Values of the swept parameter; needed with --sweep.",
)
@click.option(
    "--tan",
    is_flag=True,
    help="Also show TAN's closed form of epsilon in a sweep at given noise.  A sweep "
    "over noise-multiplier then holds the total noise: batches grow with the noise.",
)
@click.option(
    "--also-num-steps",
    type=NumberList(int, example="1000,10000"),
    metavar="T1,T2,...",
    help="Also show such a sweep at other numbers of steps, with the same total noise.",
)
@shared_options.of_runs("Of so many runs together, each on batches of its own.")
@click.option(
    "--runs",
    type=int,
    metavar="N",
    help="Also the price of tuning with N runs: all of them shown, or only the best.",
)
@model_mix.options
@shared_options.as_json
@shared_options.plot("Also draw the answers, e.g. a.png.")
def plan_command(**flags: Any) -> None:
    """Noise (or epsilon) of each sampler, side by side.

    The default relation is zero-out: an example is replaced by a ghost that contributes
    zero.  Under another relation, samplers that are not accounted for are left out, or
    refused if named.  A lower bound is no guarantee and is never shown as one.

    \b
    Example, one epoch of 36.8 million examples at epsilon 5:
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 5 --delta 2.7e-8
    The same as a plot against the batch size:
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 5 --delta 2.7e-8 --sweep batch-size \\
          --values 4096,16384,65536 --plot noise.png
    The noise that users with up to 10 examples need:
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 5 --delta 2.7e-8 --sampler truncated-poisson \\
          --sweep max-examples-per-user --values 1,2,5,10 --plot users.png
    The noise of each of five runs that have epsilon 3 together:
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 3 --delta 2.7e-8 --of-runs 5
    What tuning with 16 runs costs, if all are shown and if only the best one is:
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 3 --delta 2.7e-8 --runs 16
    """
    from accounting.cli import plan_answers  # after --help: tables, and the accountant

    plan_answers.print_answers(flags)
