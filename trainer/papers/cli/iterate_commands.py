"""``dpsgd variance`` and ``dpsgd shift``: experiments on the iterates of runs."""

from __future__ import annotations

from typing import Any

import click

from accounting.cli import registered, shared_options
from accounting.cli.grouped import Grouped
from accounting.core.plan import TRUNCATED_POISSON
from pipelines.job.batch_settings import BatchSettings
from trainer.cli import method_flags, setting_flags
from trainer.cli.experiments import experiment_flags
from trainer.papers.settings import ShiftSettings, VarianceSettings
from trainer.settings.aggregation_settings import AggregationSettings
from trainer.settings.method_settings import DP_SGD, NON_PRIVATE
from trainer.settings.request import Request


@click.command(
    cls=Grouped,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
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
@shared_options.as_json
@click.pass_context
def variance(ctx: click.Context, as_json: bool, **flags: Any) -> None:
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
    settings = _variance_settings(flags, tuple(ctx.args))
    from trainer.cli.experiments import experiment_body
    from trainer.papers import variance as varying
    from trainer.papers import variance_report

    experiment_body.run(
        lambda *given: variance_report.report(varying.variance(*given)),
        settings,
        as_json=as_json,
    )


def _variance_settings(
    flags: dict[str, Any], rest: tuple[str, ...]
) -> VarianceSettings:
    names = [
        "method", "keep_last", "epsilon", "noise_multiplier", "delta",
        "allow_large_delta", "l2_norm_clip",
    ]  # fmt: skip
    if flags["method"] == NON_PRIVATE:
        del names[2:]
    request: Request = experiment_flags.request(
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


@click.command(
    cls=Grouped,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@setting_flags.settings(ShiftSettings)
@shared_options.noise_multiplier("Noise multiplier of all runs.")
@shared_options.l2_norm_clip("Clip norm of all runs.")
@method_flags.method("Method of all runs.", default=DP_SGD)
@shared_options.as_json
@click.pass_context
def shift(ctx: click.Context, as_json: bool, **flags: Any) -> None:
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
    settings = _shift_settings(flags, tuple(ctx.args))
    from trainer.cli.experiments import experiment_body
    from trainer.papers import shift as shifting
    from trainer.papers import shift_report

    experiment_body.run(
        lambda *given: shift_report.report(shifting.shift(*given)),
        settings,
        as_json=as_json,
    )


def _shift_settings(flags: dict[str, Any], rest: tuple[str, ...]) -> ShiftSettings:
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
