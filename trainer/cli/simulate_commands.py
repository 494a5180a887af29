"""``dpsgd simulate``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import click

from accounting import plan as plans
from accounting.cli import delta_flags
from accounting.validation import InputError, check_choice, check_float, check_int
from trainer.model.metrics import BINARY, METRICS
from trainer.settings.aggregation_settings import OMV, OPA
from trainer.settings.method_settings import DP_SGD, DP_SGD_RELEASES
from trainer.settings.train_settings import TrainSettings

_FOLDER = click.Path(file_okay=False, path_type=pathlib.Path)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.option("--input", "source", required=True, help="Folder of training Parquet.")
@click.option("--eval", "held_out", type=_FOLDER, required=True, help="Held-out split.")
@click.option("--out", type=_FOLDER, required=True, help="New, or of this simulation.")
@click.option(
    "--batch-size", type=int, required=True,
    help="Expected rows per step of the reference: the run that is predicted.",
)  # fmt: skip
@click.option("--epochs", type=int, help="Of the reference.")
@click.option("--num-steps", type=int, help="Of all runs, instead of --epochs.")
@click.option(
    "--small-batch-sizes",
    required=True,
    metavar="B1,B2,...",
    help="Expected rows per step of the simulated runs: two sizes or more.",
)
@click.option("--epsilon", type=float, help="Target of the reference.")
@click.option("--noise-multiplier", type=float, help="Instead of --epsilon.")
@delta_flags.options(text="Of the reference.", required=True)
@click.option("--l2-norm-clip", type=float, required=True, help="Of all runs.")
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
@click.option("--seeds", type=int, default=3, show_default=True, help="Repetitions.")
@click.option("--metric", default="auc", show_default=True, help="Held-out metric.")
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
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
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
    report = _carry_out(flags, tuple(ctx.args))
    out: pathlib.Path = flags["out"]
    fields = _write(out, report)
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    report.show()
    click.echo(f"table and plot in {out}/simulation.md")


def _write(out: pathlib.Path, report: Any) -> dict[str, Any]:
    from pipelines.batches.manifest import pretty_json, write_atomically

    fields: dict[str, Any] = report.to_json()
    write_atomically(out / "simulation.json", pretty_json(fields))
    report.plot(out / "simulation.png")
    text = report.markdown(picture="simulation.png")
    write_atomically(out / "simulation.md", text.encode())
    return fields


def _carry_out(flags: dict[str, Any], rest: tuple[str, ...]) -> Any:
    sizes, settings = _check(flags, rest)
    from trainer.experiments.simulation import Simulator, best
    from trainer.experiments.simulation_report import NOT_PRIVATE, Report

    protocol, statement = _protocol(flags, rest, sizes, settings)
    _say(NOT_PRIVATE)
    simulator = Simulator(
        protocol,
        source=flags["source"],
        held_out=flags["held_out"],
        out=flags["out"],
        say=_say,
    )
    found = [simulator.simulate(rate) for rate in protocol.learning_rates]
    if flags["run_reference"]:
        chosen = best(found, protocol.metric)
        found[found.index(chosen)] = simulator.run_reference(chosen)
    return Report(protocol, found, statement)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _check(
    flags: dict[str, Any], rest: tuple[str, ...]
) -> tuple[tuple[int, ...], TrainSettings]:
    """Returns batch sizes and settings; refuses what can be before a file is read."""
    from accounting import tan
    from trainer.cli.commands import integers

    name = "small_batch_sizes"
    sizes = tuple(sorted(integers(name, flags[name], example="64,128,256")))
    check_int("batch_size", flags["batch_size"], at_least=1)
    tan.check_sizes(sizes, flags["batch_size"])
    check_int("seeds", flags["seeds"], at_least=1)
    if flags["seeds"] * len(sizes) < 3:
        raise InputError(
            f"Expected seeds={flags['seeds']} times {len(sizes)} batch sizes to be at "
            "least 3 runs: two points lie on a line, however far they scatter."
        )
    check_float("confidence", flags["confidence"], above=0, below=1)
    if (flags["epsilon"] is None) == (flags["noise_multiplier"] is None):
        raise InputError("Expected exactly one of --epsilon and --noise-multiplier.")
    for name in ("epsilon", "noise_multiplier"):
        if flags[name] is not None:
            check_float(name, flags[name], above=0)
    return sizes, _check_train_flags(flags, rest)


def _check_train_flags(flags: dict[str, Any], rest: tuple[str, ...]) -> TrainSettings:
    """Returns the settings; refuses what `dpsgd train` would."""
    from trainer.experiments.compare import LAST, OWN_FLAGS, check_train_flags

    rates = flags["learning_rates"]
    if len(set(rates)) != len(rates):
        raise InputError(f"Expected learning_rate={rates} to hold each value once.")
    common = (
        f"--eval={flags['held_out']}", f"--out={flags['out']}",
        f"--method={flags['method']}", *delta_flags.arguments(flags),
        f"--l2-norm-clip={flags['l2_norm_clip']}",
        # The noise is not known yet; any will do.
        "--noise-multiplier=1",
    )  # fmt: skip
    for rate in rates:
        arguments = (*common, f"--learning-rate={rate}")
        settings = check_train_flags(
            arguments,
            rest,
            metric=flags["metric"],
            own=(*OWN_FLAGS, "--learning-rate", "--l2-norm-clip"),
        )
    # They differ in their learning rate alone.
    check_choice(
        "weights",
        flags["weights"],
        (LAST, *_averages_with(flags["metric"], settings)),
        remedy="`dpsgd train --help` names the flags that make averages.",
    )
    return settings


def _averages_with(metric: str, settings: TrainSettings) -> Iterator[str]:
    """Yields the averages that will have the metric."""
    has_outputs = settings.task == BINARY and metric in METRICS[BINARY]
    for name in settings.average_names:
        # A majority has no probability.
        if name == OMV and metric == "log_loss":
            continue
        if name not in (OPA, OMV) or has_outputs:
            yield name


def _protocol(
    flags: dict[str, Any],
    rest: tuple[str, ...],
    sizes: tuple[int, ...],
    settings: TrainSettings,
) -> tuple[Any, Any]:
    """Returns what is to be done, and the privacy statement of the reference."""
    from accounting.comparison import LARGEST_DESIGN_EPSILON
    from trainer.experiments.simulation import Protocol
    from trainer.run import privacy
    from trainer.settings.method_settings import gradients_text

    reference = _reference(flags)
    statement = privacy.plan_statement(
        reference.plan,
        noise_multiplier=reference.noise_multiplier,
        l2_norm_clip=flags["l2_norm_clip"],
        delta=flags["delta"],
        gradients=gradients_text(settings.method, settings.describe_method()),
        allow_large_delta=flags["allow_large_delta"],
    )
    delta_flags.warn(flags["delta"], reference.plan.num_examples)
    names = ("seeds", "method", "l2_norm_clip", "metric", "weights", "confidence")
    protocol = Protocol(
        reference=reference,
        epsilon=flags["epsilon"]
        or min(statement.epsilon.guarantee, LARGEST_DESIGN_EPSILON),
        delta=flags["delta"],
        batch_sizes=sizes,
        learning_rates=flags["learning_rates"],
        flags=(*rest, *delta_flags.allowance(flags)),
        **{name: flags[name] for name in names},
    )
    return protocol, statement


def _reference(flags: dict[str, Any]) -> Any:
    """Returns the plan and the noise of the run that is predicted."""
    from accounting.comparison import Question
    from accounting.tan import Configuration
    from pipelines.inputs.parquet_blocks import list_blocks
    from trainer.run import privacy

    num_examples = list_blocks(flags["source"]).num_examples
    num_steps, num_epochs = plans.steps_and_epochs(
        num_examples,
        flags["batch_size"],
        epochs=flags["epochs"],
        num_steps=flags["num_steps"],
    )
    question = Question(
        num_examples=num_examples,
        expected_batch_size=flags["batch_size"],
        num_steps=num_steps,
        num_epochs=num_epochs,
        delta=flags["delta"],
        epsilon=flags["epsilon"],
        noise_multiplier=flags["noise_multiplier"],
    )
    plan = question.plan(flags["sampler"])
    noise = flags["noise_multiplier"]
    if noise is None:
        noise = privacy.noise_multiplier(
            plan, epsilon=flags["epsilon"], delta=flags["delta"]
        )
    return Configuration(plan=plan, noise_multiplier=noise)
