"""``dpsgd compare``."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import click

from accounting.cli import registered, shared_options
from accounting.plan import DYNAMIC_SHUFFLE, TRUNCATED_POISSON
from accounting.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from trainer.cli import experiment_flags, method_flags
from trainer.settings.comparison_settings import ComparisonSettings, check_comparable
from trainer.settings.method_settings import DP_SGD, NON_PRIVATE
from trainer.settings.request import Request
from trainer.settings.train_settings import TrainSettings


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@experiment_flags.options
@registered.sampler(
    "May be repeated.  The noise is what the first one needs.",
    "samplers",
    multiple=True,
    default=(TRUNCATED_POISSON, DYNAMIC_SHUFFLE),
    show_default=True,
)
@method_flags.method(
    "May be repeated.", "methods", multiple=True, default=(DP_SGD, NON_PRIVATE)
)
@shared_options.epsilon(
    "Target; may be repeated.", "epsilons", multiple=True, required=True
)
@shared_options.delta("Of all targets.", required=True)
@shared_options.batch_size("Expected rows per step.", required=True)
@shared_options.epochs("Of the batches.", required=True)
@shared_options.l2_norm_clip("Of all private methods.", required=True)
@click.option(
    "--for",
    "extra",
    nargs=2,
    multiple=True,
    metavar="METHOD FLAGS",
    help="Flags of `dpsgd train` for one method; may be repeated.",
)
@click.pass_context
def compare(ctx: click.Context, as_json: bool, **flags: Any) -> None:
    """Trains on shuffled and on Poisson batches, and compares noise, epsilon and AUC.

    Same data, same model, same noise: what the first sampler needs for each target.
    The table shows, for each way of making batches, the epsilon that is proven for it
    and the one that no proof can go below.  Runs are repeated with other batches, noise
    and initial weights.  A comparison that was stopped goes on with the same command.

    All other flags go to `dpsgd train`, except those that are set for every run, as
    --init-seed.

    \b
    Example:
      dpsgd compare --input data/train --eval data/test --out comparison \\
          --batch-size 1024 --epochs 3 --epsilon 1 --epsilon 3 --delta 1e-7 \\
          --l2-norm-clip 10 --hidden 32,16
    """
    settings = _settings(flags, tuple(ctx.args))
    from trainer.cli import experiment_body

    experiment_body.compare(settings, as_json=as_json)


def _settings(flags: dict[str, Any], rest: tuple[str, ...]) -> ComparisonSettings:
    own = _flags_of_methods(flags)
    requests = [_request(flags, method, rest, own) for method in flags["methods"]]
    beside = [experiment_flags.beside(request) for request in requests]
    if any(each != beside[0] for each in beside):
        raise InputError(
            "Expected --noise-key-file and --checkpoint-every to be those of all "
            "methods. Give them outside of --for."
        )
    names = ("source", "held_out", "out", "samplers", "seeds", "metric")
    return ComparisonSettings(
        **{name: flags[name] for name in names},
        **beside[0],
        batches=BatchSettings(
            expected_batch_size=flags["batch_size"],
            num_epochs=flags["epochs"],
            epsilon=max(flags["epsilons"]),
            delta=flags["delta"],
        ),
        trained=tuple(
            each
            for request in requests
            for each in _for_targets(request.settings, flags["epsilons"])
        ),
    )


def _for_targets(
    settings: TrainSettings, epsilons: tuple[float, ...]
) -> list[TrainSettings]:
    if settings.method == NON_PRIVATE:
        return [settings]
    return [dataclasses.replace(settings, target_epsilon=each) for each in epsilons]


def _flags_of_methods(flags: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    for method in flags["methods"]:
        check_comparable(method)
    own: dict[str, tuple[str, ...]] = {}
    for method, text in flags["extra"]:
        if method not in flags["methods"]:
            raise InputError(
                f"Expected --for {method} to name one of the methods that are "
                f"compared: {', '.join(flags['methods'])}."
            )
        own[method] = (*own.get(method, ()), *_split(text))
    return own


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"Expected the flags {text!r} of --for as a shell takes them: {error}. "
            "Close the quotation."
        ) from None


def _request(
    flags: dict[str, Any],
    method: str,
    rest: tuple[str, ...],
    own: dict[str, tuple[str, ...]],
) -> Request:
    """Returns what `dpsgd train` would be asked to do for the first target."""
    set_here: dict[str, Any] = {"method": method}
    if method != NON_PRIVATE:
        names = ("delta", "allow_large_delta", "l2_norm_clip")
        set_here |= {name: flags[name] for name in names}
        set_here["epsilon"] = flags["epsilons"][0]
    return experiment_flags.request(flags, set_here, (*rest, *own.get(method, ())))
