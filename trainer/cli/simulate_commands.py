"""``dpsgd simulate``."""

from __future__ import annotations

import json
from typing import Any

import click

from accounting import plan as plans
from accounting.cli import shared_options
from accounting.validation import InputError
from trainer.cli import experiment_flags
from trainer.cli.commands import integers
from trainer.settings.comparison_settings import SimulationSettings
from trainer.settings.method_settings import DP_SGD, DP_SGD_RELEASES
from trainer.settings.train_settings import TrainSettings


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@experiment_flags.options
@shared_options.batch_size(
    "Expected rows per step of the reference: the run that is predicted.",
    required=True,
)
@shared_options.epochs("Of the reference.")
@shared_options.num_steps("Of all runs, instead of --epochs.")
@click.option(
    "--small-batch-sizes",
    required=True,
    metavar="B1,B2,...",
    help="Expected rows per step of the simulated runs: two sizes or more.",
)
@shared_options.epsilon("Target of the reference.")
@shared_options.noise_multiplier("Instead of --epsilon.")
@shared_options.delta("Of the reference.", required=True)
@shared_options.l2_norm_clip("Of all runs.", required=True)
@click.option(
    "--learning-rate",
    "learning_rates",
    type=float,
    multiple=True,
    default=(TrainSettings.learning_rate,),
    show_default=True,
    help="May be repeated: which one is predicted to be best?",
)
@click.option(
    "--method",
    type=click.Choice(DP_SGD_RELEASES),
    default=DP_SGD,
    show_default=True,
)
@click.option(
    "--sampler",
    type=click.Choice((plans.TRUNCATED_POISSON, plans.POISSON)),
    default=plans.TRUNCATED_POISSON,
    show_default=True,
)
@click.option(
    "--weights", default="last", show_default=True, help="Or an average, as ema."
)
@click.option(
    "--confidence", type=float, default=0.95, show_default=True, help="Of the interval."
)
@click.option(
    "--run-reference",
    is_flag=True,
    help="Train it too, at the best learning rate: was the prediction right?",
)
@click.pass_context
def simulate(ctx: click.Context, as_json: bool, **flags: Any) -> None:
    """Predicts a costly private run from cheap ones, to choose a learning rate.

    Keeps steps, learning rate and noise over batch size, and with them the total amount
    of noise (TAN; Sander et al. 2023, arXiv:2210.03403), trains with small batches, and
    extends a line through metric over log2(batch size) to the batch size that is meant.
    The interval is for one run, if that line goes on.

    The simulated runs are NOT private: use public data of the same kind.  One that was
    stopped goes on with the same command.  All other flags go to `dpsgd train`, but for
    those that are set for every run, as --init-seed.

    \b
    Example:
      dpsgd simulate --input public/train --eval public/test --out simulation \\
          --batch-size 4096 --small-batch-sizes 64,128,256 --epochs 10 \\
          --epsilon 3 --delta 1e-6 --l2-norm-clip 10 \\
          --learning-rate 0.1 --learning-rate 0.3
    """
    settings = _settings(flags, tuple(ctx.args))
    from trainer.experiments import simulate as experiment

    for folder in settings.out.glob("*/runs"):
        experiment_flags.take_over(folder.parent)
    report = experiment.simulate(
        settings, experiment_flags.say, experiment_flags.MAKE_BATCHES
    )
    fields = report.write(settings.out)
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    report.show()
    click.echo(f"table and plot in {settings.out}/simulation.md")


def _settings(flags: dict[str, Any], rest: tuple[str, ...]) -> SimulationSettings:
    name = "small_batch_sizes"
    sizes = integers(name, flags[name], example="64,128,256")
    if (flags["epsilon"] is None) == (flags["noise_multiplier"] is None):
        raise InputError("Expected exactly one of --epsilon and --noise-multiplier.")
    request = experiment_flags.request(
        flags,
        _of_reference(flags),
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
        small_batch_sizes=sizes,
        num_epochs=flags["epochs"],
    )


def _of_reference(flags: dict[str, Any]) -> tuple[str, ...]:
    """Returns the flags of `dpsgd train` for the run that is predicted."""
    given = ("epsilon", "noise_multiplier", "method", "l2_norm_clip")
    return (
        *(
            f"--{name.replace('_', '-')}={flags[name]}"
            for name in given
            if flags[name] is not None
        ),
        *shared_options.arguments(flags),
    )
