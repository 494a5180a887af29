"""``dpsgd tune``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import PASSES_ON, Grouped
from pipelines.job.batch_settings import BatchSettings
from trainer.cli.commands import train_request
from trainer.cli.experiments import experiment_flags
from trainer.report.progress import Terminal
from trainer.settings.train_settings import TrainSettings

#: Flags of `dpsgd train` that would be shared by runs, or say more than the winner.
_NOT_HERE = (
    "--batches", "--eval", "--epsilon", "--noise-multiplier", "--delta", "--of-runs",
    "--checkpoint-every",
)  # fmt: skip


@click.command(name="tune", cls=Grouped, context_settings=PASSES_ON)
@click.option(
    "--input",
    "source",
    type=paths.TEXT_OR_URL,
    required=True,
    help="Training rows: Parquet (a folder, a file or a quoted glob).",
)
@click.option(
    "--score",
    "scored",
    type=paths.PATH,
    required=True,
    help="Rows that train nothing, such as the part `val` of `dpsgd prepare`: runs are "
    "scored on them, with noise.",
)
@click.option(
    "--out",
    type=paths.FOLDER,
    required=True,
    help="New folder, or of a stopped search.",
)
@click.option(
    "--runs",
    "num_runs",
    type=int,
    metavar="N",
    required=True,
    help="A candidate of the best tenth is tried as surely as by N runs.  How many are "
    "made is random, secret, and more on average.",
)
@shared_options.epsilon("Of the model, for one row of --input.", required=True)
@shared_options.delta("Of model and score.", required=True)
@click.option(
    "--epsilon-of-score",
    type=float,
    help="Of the best score, for one row of --score; at most --epsilon, the default.",
)
@click.option(
    "--delta-of-score",
    type=float,
    help="Of the best score; at most --delta, the default.",
)
@click.option(
    "--by",
    "score",
    type=click.Choice(["auto", "auc", "log_loss", "accuracy", "mean_squared_error"]),
    default="auto",
    show_default=True,
    help="What is best.  auto: AUC, accuracy of more than two classes, or the squared "
    "error of a number.",
)
@shared_options.batch_size("Expected rows per step.", required=True)
@shared_options.epochs("Epochs of each run.", required=True)
@click.option(
    "--or",
    "others",
    multiple=True,
    metavar="FLAGS",
    help="Also candidates with these flags, such as '--hidden 32'; may be repeated.",
)
@shared_options.as_json
@click.pass_context
def tune_command(ctx: click.Context, as_json: bool, **flags: Any) -> None:
    """Try many settings, and release the best model alone, with one epsilon for all.

    A random number of runs is made, each with a random candidate, and batches and noise
    of its own.  Only the best one is kept.  That costs little more than one run: see
    the price by `dpsgd plan --runs N`.  To resume a stopped search, give the same
    command again.

    All other flags go to `dpsgd train`; --learning-rate, --l2-norm-clip and numeric
    settings of a method may be comma-separated lists.  Candidates are all combinations,
    and those with the flags of each --or in addition.

    \b
    Example:
      dpsgd tune --input data/train --score data/val --out tuned --runs 8 \\
          --epsilon 3 --delta 1e-6 --batch-size 256 --epochs 8 \\
          --learning-rate 0.003,0.01,0.03 --or "--hidden 32"
      dpsgd evaluate tuned/run --batches tuned/batches --input data/test
    """
    from trainer.releases import tuning  # after --help: pyarrow

    candidates = _candidates(flags, ctx.args)
    with Terminal("tuning", unit="run") as reporter:
        request = tuning.check(
            flags["source"],
            flags["scored"],
            flags["out"],
            candidates=candidates,
            batches=BatchSettings(
                expected_batch_size=flags["batch_size"],
                num_epochs=flags["epochs"],
                epsilon=max(8.0, flags["epsilon"]),
                delta=flags["delta"],
            ),
            num_runs=flags["num_runs"],
            epsilon_of_score=flags["epsilon_of_score"],
            delta_of_score=flags["delta_of_score"],
            score=flags["score"],
            say=reporter.say,
        )
        reporter.say(_price(request.described["price"]))
        found = tuning.tune_checked(request, reporter)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    place = found["winner"]["candidate"]
    chosen = shlex.join(candidate_flags(flags, ctx.args)[place]) or "the defaults"
    click.echo(_said(found, chosen, flags["out"]))


def _said(found: dict[str, Any], chosen: str, out: Path) -> str:
    run, batches = (shlex.quote(f"{out}/{name}") for name in ("run", "batches"))
    lines = [f"winner: {chosen}"]
    for name, each in found["winner"]["metrics"].items():
        low, high = each["interval"]
        lines.append(f"  {name:<10}{each['value']:8.4f}  ({low:.4f} to {high:.4f})")
    return "\n".join(
        [
            *lines,
            "These metrics are of the rows that chose it, and a little too good. "
            "For metrics of others, and for the whole statement:",
            f"  dpsgd evaluate {run} --batches {batches} --input data/test",
            f"  dpsgd account {run}",
            found["claim"],
        ]
    )


def _price(price: dict[str, Any]) -> str:
    return (
        f"noise multiplier {price['noise_multiplier']:.6g} of each run; "
        f"{price['mean']:.1f} runs expected, and a chance of "
        f"{price['chance_of_top_tenth']:.0%} to try one of the best tenth"
    )


def candidate_flags(flags: dict[str, Any], rest: list[str]) -> list[tuple[str, ...]]:
    """Returns the flags of each candidate, for `dpsgd train`.

    Args:
      flags: Flags of this command.
      rest: Its other arguments.
    """
    return [
        each
        for text in ("", *flags["others"])
        for more in [experiment_flags.split("--or", text)]
        for each in experiment_flags.each_of_lists([*rest, *more])
    ]


def candidates_of(arguments: Sequence[str]) -> list[TrainSettings]:
    """Returns the candidates of a command line; nothing is run.

    Raises:
      InputError: the command would refuse the flags before it reads a file.
    """
    with tune_command.make_context("tune", [*arguments]) as ctx:
        return _candidates(ctx.params, ctx.args)


def _candidates(flags: dict[str, Any], rest: list[str]) -> list[TrainSettings]:
    found = []
    for words in candidate_flags(flags, rest):
        experiment_flags.refuse(words, _NOT_HERE)
        privacy = ("epsilon", "delta", "allow_large_delta")
        set_here = {name: flags[name] for name in privacy}
        request = train_request(words, batches=".", out=flags["out"], **set_here)
        found.append(request.settings)
    return found
