"""``dpsgd simulate``."""

from __future__ import annotations

from typing import Any

import click

from accounting.cli import shared_options
from accounting.cli.grouped import Grouped
from accounting.cli.registered import Registered
from accounting.core.validation import InputError
from trainer.cli import method_flags, setting_flags
from trainer.cli.experiments import experiment_flags
from trainer.papers.settings import DEFAULT_RATE, SimulationSettings
from trainer.settings import methods
from trainer.settings.method_settings import DP_SGD


@click.command(
    cls=Grouped,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@setting_flags.settings(SimulationSettings)
@shared_options.epsilon("Target epsilon of the reference.")
@shared_options.noise_multiplier("Instead of --epsilon.")
@shared_options.delta("Delta of the reference.", required=True)
@shared_options.l2_norm_clip("Clip norm of all runs.", required=True)
@click.option(
    "--learning-rate",
    "learning_rates",
    type=float,
    multiple=True,
    default=(DEFAULT_RATE,),
    show_default=True,
    help="May be repeated, to find the one that is predicted to be best.",
)
@method_flags.method(
    "Method of all runs.",
    type=Registered(methods.with_dp_sgd_accounting),
    default=DP_SGD,
)
@shared_options.as_json
@click.pass_context
def simulate(ctx: click.Context, as_json: bool, **flags: Any) -> None:
    """Predicts a costly private run from cheap ones, to choose a learning rate.

    Trains with small batches at the same number of steps, learning rate and ratio of
    noise to batch size, hence the same total amount of noise (TAN; Sander et al. 2023,
    arXiv:2210.03403).  Then extrapolates the metric, as a line in log2(batch size), to
    the batch size of the reference.  The interval is for one run, if the line holds.

    The simulated runs are NOT private: use public data of the same kind.  To resume,
    give the same command again.  All other flags go to `dpsgd train`, except those that
    are set for every run, such as --init-seed.

    \b
    Example:
      dpsgd simulate --input public/train --eval public/test --out simulation \\
          --batch-size 4096 --small-batch-sizes 64,128,256 --epochs 10 \\
          --epsilon 3 --delta 1e-6 --l2-norm-clip 10 \\
          --learning-rate 0.1 --learning-rate 0.3
    """
    settings = _settings(flags, tuple(ctx.args))
    from trainer.cli.experiments import experiment_body
    from trainer.papers import simulate as simulating

    experiment_body.run(simulating.simulate, settings, as_json=as_json)


def _settings(flags: dict[str, Any], rest: tuple[str, ...]) -> SimulationSettings:
    if (flags["epsilon"] is None) == (flags["noise_multiplier"] is None):
        raise InputError("Expected exactly one of --epsilon and --noise-multiplier.")
    of_reference = (
        "method", "epsilon", "noise_multiplier", "delta", "allow_large_delta",
        "l2_norm_clip",
    )  # fmt: skip
    request = experiment_flags.request(
        flags,
        {name: flags[name] for name in of_reference},
        rest,
        also_set=("--learning-rate", "--l2-norm-clip"),
    )
    return SimulationSettings(
        **setting_flags.take(flags, SimulationSettings),
        **experiment_flags.beside(request),
        learning_rates=flags["learning_rates"],
        training=request.settings,
    )
