"""``dpsgd compare``."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from accounting.cli import registered, shared_options
from accounting.cli.grouped import PASSES_ON, Grouped
from accounting.cli.registered import Registered
from accounting.core.claim import AUTO_CLIP
from accounting.core.plan import DYNAMIC_SHUFFLE, TRUNCATED_POISSON
from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from trainer.cli import method_flags, setting_flags
from trainer.cli.experiments import experiment_flags
from trainer.cli.experiments.experiment_flags import listed
from trainer.cli.setting_flags import NumberOr
from trainer.settings import methods
from trainer.settings.methods import DP_SGD, NON_PRIVATE
from trainer.settings.requests import (
    NOISE_RULES,
    SAME,
    ComparisonSettings,
    Request,
)
from trainer.settings.train_settings import TrainSettings


@click.command(cls=Grouped, context_settings=PASSES_ON)
@setting_flags.settings(ComparisonSettings)
@registered.sampler(
    "Samplers.",
    "samplers",
    **listed(registered.SAMPLER),
    default=(TRUNCATED_POISSON, DYNAMIC_SHUFFLE),
    show_default=True,
)
@method_flags.method(
    "Training methods.",
    "methods",
    **listed(Registered(methods.names)),
    default=(DP_SGD, NON_PRIVATE),
)
@shared_options.epsilon("Target epsilons.", "epsilons", **listed(click.FLOAT))
@shared_options.noise_multiplier(
    "Noise for all samplers, instead of --epsilon.", "noises", **listed(click.FLOAT)
)
@click.option(
    "--noise",
    "rules",
    **listed(click.Choice(NOISE_RULES)),
    default=(SAME,),
    show_default=True,
    help="How a target determines noise.  same: the noise of the first sampler, for "
    "all.  own: the noise proven to suffice for each.  optimistic: the least that "
    "lower bounds allow for each, without any guarantee.",
)
@shared_options.delta("Delta of all targets.", required=True)
@shared_options.batch_size(
    "Expected rows per step.", "batch_sizes", required=True, **listed(click.INT)
)
@shared_options.epochs("Epochs of the batches.", required=True, **listed(click.INT))
@shared_options.l2_norm_clip(
    "Clip norm of all private methods, or auto.  [default: auto]",
    "clips",
    **listed(NumberOr(AUTO_CLIP)),
)
@click.option(
    "--for",
    "extra",
    nargs=2,
    multiple=True,
    metavar="METHOD FLAGS",
    help="Flags of `dpsgd train` for one method only; may be repeated.",
)
@shared_options.as_json
@click.pass_context
def compare(ctx: click.Context, as_json: bool, **flags: Any) -> None:
    """Trains with several samplers, methods and settings, and compares the models.

    Answers two questions of Scalable DP-SGD (Chua et al. 2024, arXiv:2411.04205): which
    sampler gives the better model at one epsilon, each with the noise it needs; and, at
    one noise, which epsilon is proven for each sampler, and below which none can be.

    Values may be comma-separated lists: of samplers, methods, epsilon, noise, batch
    size, epochs and, for tuning, of --l2-norm-clip, --learning-rate and numeric
    settings of a method, such as --mix-width.  All combinations are trained, each
    --seeds times with other batches, noise and initial weights.  Runs share batches
    where possible.  To resume a stopped comparison, give the same command again.

    Choosing among runs on the same data costs privacy that no statement of a single run
    covers.  All other flags go to `dpsgd train`, except those that are set for every
    run, such as --init-seed.

    \b
    Examples, the question of the paper, and ModelMix and DP-SGD:
      dpsgd compare --input data/train --eval data/test --out comparison \\
          --noise own,optimistic --epsilon 1,2,4 --delta 1e-7 \\
          --batch-size 1024 --epochs 1,5
      dpsgd compare --input data/train --eval data/test --out mixed \\
          --sampler truncated-poisson --method dp-sgd,model-mix \\
          --epsilon 3 --delta 1e-7 --batch-size 1024 --epochs 3 \\
          --l2-norm-clip 3,10 --learning-rate 0.1,0.3 --for model-mix \\
          "--optimizer sgd --learning-rate 1,3 --mix-width 0.01,0.1"
    """
    settings = _settings(flags, tuple(ctx.args))
    from trainer.cli.experiments import compare_body  # after --help

    compare_body.run(settings, as_json=as_json)


def _settings(flags: dict[str, Any], rest: tuple[str, ...]) -> ComparisonSettings:
    own = _flags_of_methods(flags)
    requests = [
        request
        for method in flags["methods"]
        for request in _requests(flags, method, (*rest, *own.get(method, ())))
    ]
    every, *others = {request.checkpoint_every for request in requests}
    if others:
        raise InputError(
            "Expected --checkpoint-every to be that of all methods. Give it outside of "
            "--for."
        )
    return ComparisonSettings(
        **setting_flags.take(flags, ComparisonSettings),
        checkpoint_every=every,
        samplers=flags["samplers"],
        noise=flags["rules"],
        batches=tuple(
            BatchSettings(expected_batch_size=size, num_epochs=epochs)
            for size in flags["batch_sizes"]
            for epochs in flags["epochs"]
        ),
        trained=tuple(
            each
            for request in requests
            for each in _for_targets(request.settings, flags)
        ),
    )


def _for_targets(settings: TrainSettings, flags: dict[str, Any]) -> list[TrainSettings]:
    if settings.method == NON_PRIVATE:
        return [settings]
    name = "target_epsilon" if flags["epsilons"] else "noise_multiplier"
    values = flags["epsilons"] or flags["noises"]
    return [dataclasses.replace(settings, **{name: value}) for value in values]


def _flags_of_methods(flags: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    if bool(flags["epsilons"]) == bool(flags["noises"]):
        raise InputError("Expected exactly one of --epsilon and --noise-multiplier.")
    own: dict[str, tuple[str, ...]] = {}
    for method, text in flags["extra"]:
        if method not in flags["methods"]:
            raise InputError(
                f"Expected --for {method} to name one of the methods compared: "
                f"{', '.join(flags['methods'])}."
            )
        own[method] = (*own.get(method, ()), *experiment_flags.split("--for", text))
    return own


def _requests(
    flags: dict[str, Any], method: str, rest: tuple[str, ...]
) -> list[Request]:
    """Returns the requests to `dpsgd train` for the first target."""
    set_here: dict[str, Any] = {"method": method}
    if method != NON_PRIVATE:
        set_here |= {name: flags[name] for name in ("delta", "allow_large_delta")}
        set_here["epsilon"] = next(iter(flags["epsilons"]), None)
        set_here["noise_multiplier"] = next(iter(flags["noises"]), None)
        clips = ",".join(map(str, flags["clips"] or (AUTO_CLIP,)))
        rest = (f"--l2-norm-clip={clips}", *rest)
    return [
        experiment_flags.request(flags, set_here, arguments)
        for arguments in experiment_flags.each_of_lists(rest)
    ]
