"""``dpsgd bias``: the figures of BAM's paper, on public data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from accounting.cli import shared_options
from accounting.cli.registered import Registered
from accounting.core.validation import InputError
from trainer.cli import method_flags, run_flags
from trainer.cli.commands import train_request
from trainer.cli.experiments import experiment_flags
from trainer.papers.settings import BiasSettings
from trainer.settings import methods

_FOLDER = click.Path(file_okay=False, path_type=Path)

#: Flags of `dpsgd train` that are set for every run; a second value would win.
_SET_FOR_ALL = ("--batches", "--eval", "--out", "--method", "--non-private-diagnostics")


@click.command(
    cls=method_flags.SettingsOfMethods,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@run_flags.batches()
@run_flags.held_out(help="Held-out examples, as for `dpsgd train`.")
@click.option(
    "--out", type=_FOLDER, required=True, help="New folder, or of a stopped run."
)
@run_flags.data_is_public(
    help="Declare that the training examples need no protection.  Required.",
)
@method_flags.method(
    "May be repeated.  [default: all methods accounted for as DP-SGD]",
    "trained_by",
    type=Registered(methods.names),
    multiple=True,
)
@shared_options.as_json
@click.pass_context
def bias(ctx: click.Context, as_json: bool, **flags: Any) -> None:
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
    settings = _settings(flags, ctx.args)
    from trainer.cli.experiments import experiment_body
    from trainer.papers.bias import measure_bias

    experiment_body.run(measure_bias, settings, as_json=as_json)


def _settings(flags: dict[str, Any], rest: list[str]) -> BiasSettings:
    experiment_flags.refuse(rest, _SET_FOR_ALL)
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
