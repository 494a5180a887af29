"""``dpsgd simulate``."""

from __future__ import annotations

from typing import Any

import click

from accounting import plan as plans
from accounting.cli import registered, shared_options
from accounting.cli.registered import Registered
from accounting.validation import InputError
from trainer.cli import method_flags
from trainer.cli.experiments import experiment_flags
from trainer.cli.setting_flags import Listed
from trainer.papers.settings import SimulationSettings
from trainer.settings import methods
from trainer.settings.method_settings import DP_SGD
from trainer.settings.train_settings import TrainSettings


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@experiment_flags.options
@shared_options.batch_size(
    "Expected rows per step of the reference, the run to predict.",
    required=True,
)
@shared_options.epochs("Epochs of the reference.")
@shared_options.num_steps("Number of steps of all runs, instead of --epochs.")
@click.option(
    "--small-batch-sizes",
    required=True,
    type=Listed(click.INT),
    metavar="B1,B2,...",
    help="Expected rows per step of the simulated runs: two or more sizes.",
)
@shared_options.epsilon("Target epsilon of the reference.")
@shared_options.noise_multiplier("Instead of --epsilon.")
@shared_options.delta("Delta of the reference.", required=True)
@shared_options.l2_norm_clip("Clip norm of all runs.", required=True)
@click.option(
    "--learning-rate",
    "learning_rates",
    type=float,
    multiple=True,
    default=(TrainSettings.learning_rate,),
    show_default=True,
    help="May be repeated, to find the one that is predicted to be best.",
)
@method_flags.method(
    "Method of all runs.",
    type=Registered(methods.with_dp_sgd_accounting),
    default=DP_SGD,
)
@registered.sampler(
    "Sampler of all batches.",
    type=click.Choice((plans.TRUNCATED_POISSON, plans.POISSON)),
    default=plans.TRUNCATED_POISSON,
    show_default=True,
)
@click.option(
    "--weights", default="last", show_default=True, help="Or an average, such as ema."
)
@click.option(
    "--confidence",
    type=float,
    default=0.95,
    show_default=True,
    help="Level of the interval.",
)
@click.option(
    "--run-reference",
    is_flag=True,
    help="Also train the reference at the best learning rate, to test the prediction.",
)
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
    names = (
        "source", "held_out", "out", "seeds", "metric", "num_steps", "learning_rates",
        "sampler", "weights", "confidence", "run_reference",
    )  # fmt: skip
    return SimulationSettings(
        **{name: flags[name] for name in names},
        **experiment_flags.beside(request),
        training=request.settings,
        expected_batch_size=flags["batch_size"],
        small_batch_sizes=flags["small_batch_sizes"],
        num_epochs=flags["epochs"],
    )
