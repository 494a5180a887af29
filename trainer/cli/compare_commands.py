"""``dpsgd compare``."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
from typing import Any

import click

from accounting.cli import delta_flags
from accounting.plan import (
    DYNAMIC_SHUFFLE,
    SAMPLERS,
    TRUNCATED_POISSON,
    steps_and_epochs,
)
from accounting.validation import InputError, check_float, check_int
from trainer.settings.method_settings import DP_SGD, METHODS, MODEL_MIX, NON_PRIVATE

_TITLE = "Same noise, other batches"
_FOLDER = click.Path(file_okay=False, path_type=pathlib.Path)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.option("--input", "source", required=True, help="Folder of training Parquet.")
@click.option("--eval", "held_out", type=_FOLDER, required=True, help="Held-out split.")
@click.option("--out", type=_FOLDER, required=True, help="New, or of this comparison.")
@click.option(
    "--sampler",
    "samplers",
    multiple=True,
    default=(TRUNCATED_POISSON, DYNAMIC_SHUFFLE),
    show_default=True,
    type=click.Choice(SAMPLERS),
    help="May be repeated.  The noise is what the first one needs.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=(DP_SGD, NON_PRIVATE),
    show_default=True,
    type=click.Choice(METHODS),
    help="May be repeated.",
)
@click.option(
    "--epsilon", "epsilons", type=float, multiple=True, required=True,
    help="Target; may be repeated.",
)  # fmt: skip
@delta_flags.options(text="Of all targets.", required=True)
@click.option("--batch-size", type=int, required=True, help="Expected rows per step.")
@click.option("--epochs", type=int, required=True, help="Of the batches.")
@click.option("--seeds", type=int, default=3, show_default=True, help="Repetitions.")
@click.option(
    "--l2-norm-clip", type=float, required=True, help="Of all private methods."
)
@click.option(
    "--for",
    "extra",
    nargs=2,
    multiple=True,
    metavar="METHOD FLAGS",
    help="Flags of `dpsgd train` for one method; may be repeated.",
)
@click.option("--metric", default="auc", show_default=True, help="Held-out metric.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
@click.pass_context
def compare(ctx: click.Context, as_json: bool, **flags: Any) -> None:
    """Trains on shuffled and on Poisson batches, and compares noise, epsilon and AUC.

    Same data, same model, same noise: what the first sampler needs for each target.
    The table shows, for each way of making batches, the epsilon that is proven for it
    and the one that no proof can go below.  Runs are repeated with other batches, noise
    and initial weights.  A comparison that was stopped goes on with the same command.

    All other flags go to `dpsgd train`, but for those that are set for every run, as
    --init-seed.

    \b
    Example:
      dpsgd compare --input data/train --eval data/test --out comparison \\
          --batch-size 1024 --epochs 3 --epsilon 1 --epsilon 3 --delta 1e-7 \\
          --l2-norm-clip 10 --hidden 32,16
    """
    outcomes = _carry_out(flags, tuple(ctx.args))
    out: pathlib.Path = flags["out"]
    fields = write_results(out, outcomes, title=_TITLE)
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    from trainer.experiments import compare_report

    compare_report.show(outcomes, title=_TITLE)
    click.echo(f"table and plot in {out}/comparison.md")


def write_results(
    out: pathlib.Path, outcomes: list[Any], *, title: str
) -> list[dict[str, Any]]:
    """Writes comparison.json, comparison.md and comparison.png; returns the first."""
    from pipelines.batches.manifest import pretty_json, write_atomically
    from trainer.experiments import compare_report

    fields = [dataclasses.asdict(outcome) for outcome in outcomes]
    write_atomically(out / "comparison.json", pretty_json(fields))
    compare_report.plot(outcomes, out / "comparison.png", title=title)
    text = compare_report.markdown(outcomes, title=title, picture="comparison.png")
    write_atomically(out / "comparison.md", text.encode())
    return fields


def _check(flags: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the flags of each method of its own."""
    check_int("seeds", flags["seeds"], at_least=1)
    if MODEL_MIX in flags["methods"]:
        raise InputError(
            f"Expected no --method {MODEL_MIX}: methods are compared at one noise, and "
            "its noise is its own. Train it by `dpsgd train --epsilon`."
        )
    for epsilon in flags["epsilons"]:
        check_float("epsilon", epsilon, above=0)
    check_float("l2_norm_clip", flags["l2_norm_clip"], above=0)
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


def _check_batches(flags: dict[str, Any]) -> None:
    """Refuses what `dpsgd batches` would, before any batch is made."""
    from pipelines.inputs.parquet_blocks import list_blocks

    num_examples = list_blocks(flags["source"]).num_examples
    steps_and_epochs(
        num_examples, flags["batch_size"], epochs=flags["epochs"], num_steps=None
    )


def _carry_out(flags: dict[str, Any], rest: tuple[str, ...]) -> list[Any]:
    from trainer.experiments.compare import Comparison, summarise

    own = _check(flags)
    _check_train_flags(flags, rest, own)
    _check_batches(flags)
    comparison = Comparison(
        flags["out"], flags["held_out"], lambda line: click.echo(line, err=True)
    )
    noise = _noise(comparison, flags)
    results = []
    trials = _trials(flags, rest, own, noise)
    for number, trial in enumerate(trials, start=1):
        click.echo(f"[{number}/{len(trials)}] {trial.name}", err=True)
        results.append((trial, comparison.run(trial)))
    return summarise(results, metric=flags["metric"])


def _check_train_flags(
    flags: dict[str, Any], rest: tuple[str, ...], own: dict[str, tuple[str, ...]]
) -> None:
    """Refuses what `dpsgd train` would, before any batch is made."""
    from trainer.experiments.compare import check_train_flags

    for method in flags["methods"]:
        arguments = (
            f"--eval={flags['held_out']}", f"--out={flags['out']}",
            # The noise is not known yet; any will do.
            f"--method={method}", *_train_flags(flags, method, 1.0),
        )  # fmt: skip
        more = (*rest, *own.get(method, ()))
        check_train_flags(arguments, more, metric=flags["metric"])


def _noise(comparison: Any, flags: dict[str, Any]) -> dict[float, float]:
    """Makes all batches; returns the noise multiplier of each target."""
    from pipelines.batches.manifest import read_manifest
    from trainer.experiments.compare import Sampling
    from trainer.run import privacy

    sampling = Sampling(
        source=flags["source"],
        flags=(f"--batch-size={flags['batch_size']}", f"--epochs={flags['epochs']}"),
    )
    folders = [
        comparison.make_batches(_for_target(sampling, flags, sampler), sampler, seed)
        for sampler in flags["samplers"]
        for seed in range(flags["seeds"])
    ]
    plan = read_manifest(folders[0]).plan
    delta_flags.warn(flags["delta"], plan.num_examples)
    return {
        epsilon: privacy.noise_multiplier(plan, epsilon=epsilon, delta=flags["delta"])
        for epsilon in flags["epsilons"]
    }


def _for_target(sampling: Any, flags: dict[str, Any], sampler: str) -> Any:
    """Adds, for truncated batches, the target that their size must be safe for."""
    if sampler != TRUNCATED_POISSON:
        return sampling
    more = (f"--epsilon={max(flags['epsilons'])}", *delta_flags.arguments(flags))
    return dataclasses.replace(sampling, flags=(*sampling.flags, *more))


def _train_flags(
    flags: dict[str, Any], method: str, noise_multiplier: float | None
) -> tuple[str, ...]:
    if method == NON_PRIVATE or noise_multiplier is None:
        return ()
    return (
        f"--noise-multiplier={noise_multiplier!r}",
        *delta_flags.arguments(flags),
        f"--l2-norm-clip={flags['l2_norm_clip']!r}",
    )


def _trials(
    flags: dict[str, Any],
    rest: tuple[str, ...],
    own: dict[str, tuple[str, ...]],
    noise: dict[float, float],
) -> list[Any]:
    from trainer.experiments.compare import Trial

    return [
        Trial(
            sampler=sampler,
            method=method,
            epsilon=epsilon,
            seed=seed,
            flags=(
                *_train_flags(flags, method, noise.get(epsilon) if epsilon else None),
                *rest,
                *own.get(method, ()),
            ),
        )
        for method in flags["methods"]
        for epsilon in ([None] if method == NON_PRIVATE else flags["epsilons"])
        for sampler in flags["samplers"]
        for seed in range(flags["seeds"])
    ]
