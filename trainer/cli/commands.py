"""``dpsgd train`` and ``dpsgd account``: their flags, and the request of ``train``."""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accounting.cli import shared_options
from accounting.validation import InputError
from pipelines.cli.console import wrapped
from pipelines.files.paths import absolute, is_remote
from trainer.claims.workers import agreement, launch
from trainer.claims.workers.launch import DEFAULT_TIMEOUT
from trainer.cli import aggregation_commands, method_flags, plan_flags, run_flags
from trainer.core.run.run_record import PRIVACY_TEXT_NAME
from trainer.core.step.workers import Workers
from trainer.model.metrics import LOSSES
from trainer.report.progress import Terminal
from trainer.settings.request import Request
from trainer.settings.train_settings import (
    AUTO_LOSS,
    EMBEDDING_NOISES,
    OPTIMIZERS,
    SCHEDULES,
    TrainSettings,
)

if TYPE_CHECKING:  # imports TensorFlow
    from trainer.run.preflight import Checked
    from trainer.train import Summary

_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)


def integers(name: str, text: str, *, example: str) -> tuple[int, ...]:
    """Returns integers that are separated by commas; empty parts are skipped.

    Args:
      name: Name of the flag, for the error.
      text: Value of the flag.
      example: An accepted value, for the error.

    Raises:
      InputError: a part is not an integer.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise InputError(
            f"Expected {name}={text!r} to be integers separated by commas, as "
            f"{example}."
        ) from None


#: Options of `dpsgd batches` that a user may expect of `dpsgd train`.
_OF_BATCHES = (
    "--batch-size", "--epochs", "--num-steps", "--physical-batch-size", "--sampler",
    "--truncated-batch-size",
)  # fmt: skip


class _Train(method_flags.TrainsByMethods):
    """A command that names `dpsgd batches` as the place of options of the plan."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments: see `click.Command.parse_args`."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.replace("_", "-")
            if name not in _OF_BATCHES:
                raise
            raise InputError(
                f"Expected no {name} for `dpsgd train`: the batches determine it. "
                f"Omit it, or make other batches by `dpsgd batches {name}`."
            ) from None


@click.command(name="train", cls=_Train)
@run_flags.batches(
    type=run_flags.PLACE,
    help="Folder that `dpsgd batches` wrote, here or in a store: s3:// and such, with "
    "the client's own settings from the environment.",
)
@run_flags.held_out(
    help="Held-out examples: Parquet (a folder, a file or a quoted glob) with the "
    "columns of the batches, such as a split of `dpsgd prepare`.  Their metrics are "
    "published without protection, so none may be a training example.  Files that the "
    "batches were sampled from are refused; copies of training rows are not detected.",
)
@click.option(
    "--out",
    "run",
    type=run_flags.PLACE,
    required=True,
    help="New folder, here or in a store; in a store --noise-key-file is required.",
)
@click.option(
    "--non-private-diagnostics",
    is_flag=True,
    help="Write the bias of clipping, which epsilon does NOT cover, to "
    "OUT/private/non_private_clipping_bias.csv.  For public data.",
)
@shared_options.epsilon("Target epsilon, which determines the noise.")
@shared_options.delta("Well below 1 / number of examples.")
@shared_options.noise_multiplier("Instead of --epsilon.")
@shared_options.l2_norm_clip(
    "Bound on the norm of one example's gradient.  [default: 2 for a cross-entropy, 1 "
    "for any other loss]"
)
@click.option(
    "--optimizer",
    default=TrainSettings.optimizer,
    show_default=True,
    help=f"{', '.join(OPTIMIZERS)}, or module:function, which takes the learning rate "
    "and returns a Keras optimizer.",
)
@click.option(
    "--learning-rate",
    type=float,
    default=TrainSettings.learning_rate,
    show_default=True,
    help="The default suits momentum and the default clip norm; for Adam try 0.01.",
)
@click.option(
    "--learning-rate-schedule",
    type=click.Choice(SCHEDULES),
    default=TrainSettings.learning_rate_schedule,
    show_default=True,
    help="Schedule by which the learning rate decays.",
)
@click.option(
    "--warmup-steps",
    type=int,
    default=0,
    show_default=True,
    help="Steps of linear warm-up of the learning rate.",
)
@click.option(
    "--final-learning-rate-fraction",
    type=float,
    default=TrainSettings.final_learning_rate_fraction,
    show_default=True,
    help="Final learning rate of a decaying schedule, as a fraction of the initial "
    "one.",
)
@click.option(
    "--model",
    default=TrainSettings.model,
    show_default=True,
    help="default: built from the schema of the prepared table.  Or module:function, "
    "which takes the manifest and returns a Keras model whose "
    "inputs are named like columns of the batches.",
)
@click.option(
    "--views",
    type=int,
    default=TrainSettings.views,
    show_default=True,
    help="Views per example (augmentation multiplicity): the gradient of their mean "
    "loss is clipped, at the same epsilon.  Columns of shape (VIEWS, ...), or "
    "--augment.",
)
@click.option(
    "--augment",
    help="module:function (columns of one example, seed -> columns of a view), or "
    "module:layers of Keras, such as a Sequential of RandomFlip.",
)
@click.option(
    "--loss",
    default=AUTO_LOSS,
    show_default=True,
    help="auto: binary_crossentropy, sparse_categorical_crossentropy or "
    "mean_squared_error, according to the label in the schema.  Or a Keras name: "
    f"{', '.join(LOSSES)}; cross-entropies expect logits, one per example or one per "
    "class.  Labels are the column `label`.  Or module:function (labels, outputs -> "
    "one number per example).",
)
@click.option(
    "--metric",
    help="Additional metric of held-out examples: module:function (labels, predictions "
    "as NumPy arrays -> a number).",
)
@click.option(
    "--embedding-dim",
    type=int,
    default=8,
    show_default=True,
    help="Size of an embedding of the default model.",
)
@click.option(
    "--hidden",
    default="64,32",
    show_default=True,
    callback=lambda _, parameter, text: integers(parameter.name, text, example="64,32"),
    help="Sizes of the default model's hidden layers.",
)
@click.option(
    "--init-seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the initial weights, which are public.",
)
@click.option(
    "--initial-weights",
    metavar="FILE",
    help="Start at these weights: .npz of arrays in order, such as a kept iterate, or "
    ".keras of the same model, such as ema_model.keras of a run on public data.",
)
@click.option(
    "--initial-weights-are-public",
    is_flag=True,
    help="Declare that the initial weights do not depend on the training examples.  "
    "Weights of another run on these examples do: its epsilon would add to this one's.",
)
@aggregation_commands.options
@click.option(
    "--embedding-noise",
    type=click.Choice(EMBEDDING_NOISES),
    default=TrainSettings.embedding_noise,
    show_default=True,
    help="lazy, for large tables: rows of embedding tables get their noise when they "
    "are read; exact only with --optimizer sgd.  auto: lazy where that is exact and "
    "faster.",
)
@plan_flags.noise_key_file(
    "Secret noise key, made if missing.  [default: OUT/private/noise.key]"
)
@click.option(
    "--eval-every",
    type=int,
    help="Steps between evaluations.  [default: a tenth of all steps]",
)
# In the flags that older releases of `dpsgd simulate` stored.
@click.option("--simulates", default=TrainSettings.simulates, hidden=True)
@click.option(
    "--checkpoint-every",
    type=int,
    help="Steps between checkpoints.  [default: one per minute]",
)
@click.option(
    "--tensorboard", type=_FOLDER, help="Folder for TensorBoard events of the curve."
)
@click.option("--csv", type=_FILE, help="CSV file for the held-out curve.")
@click.option(
    "--worker-timeout",
    type=float,
    default=DEFAULT_TIMEOUT,
    show_default=True,
    help="Seconds that a worker waits for the other workers of `mpiexec`; must exceed "
    "the time of an evaluation.",
)
@shared_options.as_json
def train_command(**flags: Any) -> None:
    """Train on batches with DP-SGD; evaluate, export, and state epsilon.

    At the end it prints the metrics and the claim; `dpsgd account` prints the whole
    privacy statement.

    To resume an interrupted run, give the same command again.  Under `mpiexec -n 3
    dpsgd train ...`, three workers share each step, with the same results as one.

    \b
    Your own model (--model my_model:linear) is a Keras model:
      def linear(manifest):                           # in my_model.py, here
          x = keras.Input((13,), name="integers")  # as the column of the batches
          return keras.Model(x, keras.layers.Dense(1)(x))  # a logit of `label`

    \b
    Examples, for DP-SGD and for ModelMix:
      dpsgd train --batches batches --eval data/test --out run \\
          --epsilon 3 --delta 1e-7 --l2-norm-clip 10
      dpsgd train --batches batches --eval data/test --out mixed-run \\
          --epsilon 3 --delta 1e-7 --l2-norm-clip 10 --optimizer sgd \\
          --method model-mix --mix-width 0.15 --linf-factor 100
    """
    as_json = flags.pop("as_json")
    joined = launch.joined(flags.pop("worker_timeout"))
    with joined as workers, _folder_here(flags):
        request = agreement.together(workers, lambda: _request(flags))
        if not agreement.is_chief(workers):
            _help_chief(request, workers)
            return
        summary = _train(request, workers)
    if as_json:
        click.echo(json.dumps(summary.to_json(), indent=2))
        return
    click.echo(aggregation_commands.metrics_text(summary.metrics))
    click.echo(wrapped(_in_short(summary, request.noise_key_file)))
    click.echo(f"results in {summary.run}")


def _in_short(summary: Summary, noise_key_file: Path | None) -> str:
    """Returns the statement in three lines; without a claim, why there is none."""
    fields = summary.statement
    if "claim" not in fields:
        return str(fields["reason"])
    whole = f"{summary.run}/{PRIVACY_TEXT_NAME}"
    if not is_remote(summary.run):
        words = ["dpsgd", "account", str(summary.run)]
        if noise_key_file is not None:
            words += ["--noise-key-file", str(noise_key_file)]
        whole = shlex.join(words)
    return (
        f"{fields['claim']}\n"
        f"  unit        {fields['privacy_unit']}.\n"
        f"  the rest    theorem, mechanism, and what is not covered: {whole}"
    )


@contextlib.contextmanager
def _folder_here(flags: dict[str, Any]) -> Iterator[None]:
    """Names a temporary folder for a run whose folder is in a store."""
    if not is_remote(flags["run"]):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="dpsgd-run-") as folder:
        flags |= {"store": absolute(flags["run"]), "run": Path(folder)}
        yield


def _train(request: Request, workers: Workers) -> Summary:
    from trainer.run.preflight import check
    from trainer.run.stored_run import fetch

    def fetched_and_checked() -> Checked:
        fetch(request)
        return check(request)

    with Terminal() as reporter:
        checked = agreement.together(workers, fetched_and_checked)
        shared_options.warn(
            request.settings.target_delta, checked.manifest.plan.num_examples
        )
        # TensorFlow takes seconds to load, so the request is checked before.
        reporter.say("loading TensorFlow")
        from trainer.train import run_checked

        return run_checked(checked, reporter, workers)


def _help_chief(request: Request, workers: Workers) -> None:
    from trainer.run.preflight import check

    checked = agreement.together(workers, lambda: check(request, chief=False))
    from trainer.train import help_chief

    help_chief(checked, workers)


def train_request(arguments: Sequence[str], **set_here: Any) -> Request:
    """Returns the request that ``dpsgd train`` makes.

    Args:
      arguments: Arguments of its command line.
      **set_here: Values of flags that are not among ``arguments``, by parameter.

    Raises:
      InputError: the command would refuse the flags before it reads any file.
    """
    try:
        flags = train_command.make_context(
            "train", list(arguments), default_map=set_here
        ).params
    except click.ClickException as error:
        raise InputError(error.format_message()) from None
    for name in ("as_json", "worker_timeout"):
        flags.pop(name)
    return _request(flags)


def _request(flags: dict[str, Any]) -> Request:
    folders = {name: flags.pop(name) for name in ("batches", "held_out", "run")}
    others = ("store", "noise_key_file", "checkpoint_every", "tensorboard", "csv")
    rest = {name: flags.pop(name, None) for name in others}
    settings = TrainSettings(
        target_epsilon=flags.pop("epsilon"),
        target_delta=flags.pop("delta"),
        method_settings=method_flags.take(flags),
        **flags,
    )
    return Request(settings=settings, **folders, **rest)


@click.command(name="account", cls=method_flags.AccountsForMethods)
@plan_flags.options
@shared_options.l2_norm_clip("Required with settings of a method.")
@shared_options.max_examples_per_user("State epsilon for users with at most this many.")
@shared_options.relation("Neighbouring relation.  [default: zero-out]")
@click.option(
    "--cross-check",
    is_flag=True,
    help="Compare with dp_accounting, or for shuffles and balls and bins with a "
    "simulation.",
)
@click.option(
    "--trade-off",
    is_flag=True,
    help="Also bound the error rates of membership tests.",
)
@shared_options.plot("Also draw the trade-off, such as to a.png.")
@shared_options.as_json
@click.pass_context
def account(
    ctx: click.Context,
    run: Path | None,
    as_json: bool,
    cross_check: bool,
    trade_off: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """State the epsilon of a run from its record, or that of a plan.

    The exit code is 1 if a cross-check contradicts our epsilon.

    \b
    Examples, for a run, and for a plan:
      dpsgd account run
      dpsgd account --sampler poisson --num-examples 60000 --batch-size 600 \\
          --epochs 10 --noise-multiplier 1.1 --delta 1e-5 --cross-check
    """
    from trainer.cli import account_body

    more = account_body.More(cross_check=cross_check, trade_off=trade_off, plot=plot)
    if run is None:
        fields, text = account_body.of_plan(flags, more)
    else:
        fields, text = account_body.of_run(run, flags, more)
    click.echo(json.dumps(fields, indent=2) if as_json else wrapped(text))
    if cross_check and not fields["cross_check"]["agrees"]:
        ctx.exit(1)
