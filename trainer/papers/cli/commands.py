"""``dpsgd simulate``, ``variance``, ``shift`` and ``bias``: figures of the papers."""

from __future__ import annotations

from typing import Any

import click

from accounting.cli import paths, registered, shared_options
from accounting.cli.registered import Registered
from accounting.core.plan import TRUNCATED_POISSON
from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from trainer.cli import method_flags, run_flags, setting_flags
from trainer.cli.commands import train_request
from trainer.cli.experiments import experiment_flags
from trainer.cli.experiments.experiment_flags import experiment
from trainer.papers.settings import (
    DEFAULT_RATE,
    BiasSettings,
    ShiftSettings,
    SimulationSettings,
    VarianceSettings,
)
from trainer.settings import methods
from trainer.settings.aggregation_settings import AggregationSettings
from trainer.settings.comparison_settings import Experiment
from trainer.settings.method_settings import DP_SGD, NON_PRIVATE

#: Flags of `dpsgd train` that `dpsgd bias` sets; a second value would win.
_OF_BIAS = ("--batches", "--eval", "--out", "--method", "--non-private-diagnostics")


@experiment("trainer.papers.simulate:simulate")
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
def simulate(flags: dict[str, Any], rest: tuple[str, ...]) -> SimulationSettings:
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


@experiment("trainer.papers.variance:variance")
@setting_flags.settings(VarianceSettings)
@shared_options.batch_size("Expected rows per step.", required=True)
@shared_options.epochs("Epochs of the batches.")
@shared_options.num_steps("Number of steps, instead of --epochs.")
@shared_options.epsilon("Target epsilon of one run.")
@shared_options.noise_multiplier("Instead of --epsilon.")
@shared_options.delta("Delta of one run.", required=True)
@shared_options.l2_norm_clip("Clip norm of all runs.", required=True)
@setting_flags.again(
    AggregationSettings,
    "keep_last",
    help="Number of iterates per run whose spread is measured.",
    default=10,
)
@method_flags.method("Method of all runs.", default=DP_SGD)
@registered.sampler(
    "Sampler of all batches.", default=TRUNCATED_POISSON, show_default=True
)
def variance(flags: dict[str, Any], rest: tuple[str, ...]) -> VarianceSettings:
    """Compares the spread of one run's iterates with that of independent runs.

    The iterates of one private run estimate, at no further cost, how much its
    predictions vary with the noise (Shejwalkar et al. 2025, arXiv:2210.01864).  This
    command trains --seeds runs with independent batches and noise, and compares both
    spreads for every held-out example.  EVERY RUN COSTS ITS EPSILON: on private data
    they cost the sum.  To resume, give the same command again.

    All other flags go to `dpsgd train`, except those that are set for every run, such
    as --init-seed.

    \b
    Example:
      dpsgd variance --input data/train --eval data/test --out variance --seeds 10 \\
          --batch-size 1024 --epochs 3 --epsilon 3 --delta 1e-6 --l2-norm-clip 10 \\
          --keep-last 10 --keep-every 10
    """
    names = [
        "method", "keep_last", "epsilon", "noise_multiplier", "delta",
        "allow_large_delta", "l2_norm_clip",
    ]  # fmt: skip
    if flags["method"] == NON_PRIVATE:
        del names[2:]
    request = experiment_flags.request(
        flags, {name: flags[name] for name in names}, rest
    )
    training = request.settings
    batches = BatchSettings(
        sampler=flags["sampler"],
        expected_batch_size=flags["batch_size"],
        num_epochs=flags["epochs"],
        num_steps=flags["num_steps"],
        epsilon=training.target_epsilon or BatchSettings.epsilon,
        delta=flags["delta"],
    )
    return VarianceSettings(
        **setting_flags.take(flags, VarianceSettings),
        **experiment_flags.beside(request),
        batches=batches,
        training=training,
    )


@experiment("trainer.papers.shift:shift")
@setting_flags.settings(ShiftSettings)
@shared_options.noise_multiplier("Noise multiplier of all runs.")
@shared_options.l2_norm_clip("Clip norm of all runs.")
@method_flags.method("Method of all runs.", default=DP_SGD)
def shift(flags: dict[str, Any], rest: tuple[str, ...]) -> ShiftSettings:
    """Compares last weights with averages on a stream that shifts periodically.

    Orders the rows in time, so that small and large values of a column alternate like
    day and night; trains on them once, in that order; and evaluates the last weights
    and their averages along the way (Shejwalkar et al. 2025, arXiv:2210.01864).  NOT
    PRIVATE: for public or synthetic data.  To resume, give the same command again.

    All other flags go to `dpsgd train`, except those that are set for every run, such
    as --init-seed.  Without --ema-decay and --tail, both average over about one period.

    \b
    Example:
      dpsgd shift --input data/train --eval data/test --out shift --data-is-public \\
          --batch-size 256 --period 50 --shift-by label --noise-multiplier 1 \\
          --l2-norm-clip 10
    """
    names = ["method", "noise_multiplier", "l2_norm_clip"]
    if flags["method"] == NON_PRIVATE:
        del names[1:]
    request = experiment_flags.request(
        flags, {name: flags[name] for name in names}, rest
    )
    return ShiftSettings(
        **setting_flags.take(flags, ShiftSettings),
        **experiment_flags.beside(request),
        training=request.settings,
    )


@experiment("trainer.papers.bias:measure_bias", method_flags.SettingsOfMethods)
@run_flags.batches()
@run_flags.held_out(help="Held-out examples, as for `dpsgd train`.")
@click.option(
    "--out", type=paths.FOLDER, required=True, help="New folder, or of a stopped run."
)
@setting_flags.again(Experiment, "budget")
@run_flags.data_is_public(
    help="Declare that the training examples need no protection.  Required.",
)
@method_flags.method(
    "May be repeated.  [default: all methods accounted for as DP-SGD]",
    "trained_by",
    type=Registered(methods.names),
    multiple=True,
)
def bias(flags: dict[str, Any], rest: tuple[str, ...]) -> BiasSettings:
    """Measures the bias of clipping for each method.  NOT PRIVATE: for public data.

    Trains with each method on the same batches, and at every step compares the sum of
    clipped gradients with the sum of the same gradients unclipped.  For bam and dp-sat,
    also compares the ascent direction with the gradient (Knolle et al. 2023,
    arXiv:2308.12018).

    All other flags go to `dpsgd train`.  To resume, give the same command again.

    \b
    Example:
      dpsgd bias --batches public/batches --eval public/test --out bias \\
          --data-is-public --bam-radius 0.02 --sat-radius 0.05 \\
          --noise-multiplier 1 --l2-norm-clip 1
    """
    experiment_flags.refuse(rest, _OF_BIAS)
    own = method_flags.take(flags)
    trained_by = flags.pop("trained_by") or methods.with_dp_sgd_accounting()
    owners = methods.owners()
    for name in own:
        if owners[name] not in trained_by:
            raise InputError(
                f"Expected no --{name.replace('_', '-')}: --method {owners[name]} is "
                "not among the measured methods. Add it, or omit the flag."
            )
    trained = [
        train_request(
            rest,
            batches=flags["batches"],
            eval=flags["eval"],
            out=flags["out"],
            method=method,
            **{name: own[name] for name in own if owners[name] == method},
        ).settings
        for method in trained_by
    ]
    return BiasSettings(trained=tuple(trained), held_out=flags.pop("eval"), **flags)
