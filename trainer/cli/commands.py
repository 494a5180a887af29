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

from accounting.cli import paths, shared_options
from accounting.cli.grouped import Grouped, Option
from accounting.core.validation import InputError
from pipelines.files.paths import absolute, is_remote
from trainer.claims.workers import launch
from trainer.claims.workers.launch import DEFAULT_TIMEOUT
from trainer.cli import method_flags, plan_flags, run_flags, setting_flags
from trainer.cli.metrics_text import metrics_text
from trainer.core.step.workers import Workers
from trainer.report.progress import Terminal
from trainer.report.run_files import PRIVACY_TEXT_NAME
from trainer.settings.requests import Request
from trainer.settings.setting import GROUPS
from trainer.settings.train_settings import (
    TrainSettings,
)

if TYPE_CHECKING:  # imports TensorFlow
    from trainer.run.preflight import Checked
    from trainer.train import Summary


def _place(option: Option) -> int:
    return GROUPS.index(option.group) if option.group in GROUPS else len(GROUPS)


class _Train(Grouped):
    """A command with all settings of training."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns all parameters, with those of the settings after the required ones.

        Raises:
          InputError: a setting of a method has the name of another option.
        """
        params = super().get_params(ctx)
        own = method_flags.every_option()
        made = [*setting_flags.options_of(TrainSettings, Request), *own]
        method_flags.apart(own, [*params, *made[: -len(own)]])
        return [*params, *sorted(made, key=_place)]


@click.command(name="train", cls=_Train)
@run_flags.batches(
    type=paths.FOLDER_OR_URL,
    help="Folder that `dpsgd batches` wrote, here or in a store: s3:// and such, with "
    "the client's own settings from the environment.",
)
@run_flags.held_out(
    required=False,
    help="Held-out examples: Parquet (a folder, a file or a quoted glob) with the "
    "columns of the batches, such as a split of `dpsgd prepare`.  Their metrics are "
    "published without protection, so none may be a training example.  Files that the "
    "batches were sampled from are refused; copies of training rows are not detected.  "
    "Without it nothing is evaluated: see `dpsgd evaluate`.",
)
@click.option(
    "--out",
    type=paths.FOLDER_OR_URL,
    required=True,
    help="New folder, here or in a store, or of this run, interrupted.",
)
@setting_flags.config()
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

    An interrupted run goes on from its last checkpoint when you give the same command
    again.  Under `mpiexec -n 3
    dpsgd train ...`, three workers share each step, with the same results as one.

    \b
    Your own model (--model my_model:linear) is a Keras model:
      def linear(manifest):                           # in my_model.py, here
          x = keras.Input((13,), name="integers")  # as the column of the batches
          return keras.Model(x, keras.layers.Dense(1)(x))  # a logit of `label`

    \b
    Examples, for DP-SGD and for ModelMix:
      dpsgd train --batches batches --eval data/test --out run \\
          --epsilon 3 --delta 1e-7
      dpsgd train --batches batches --eval data/test --out mixed-run \\
          --epsilon 3 --delta 1e-7 --l2-norm-clip 10 --optimizer sgd \\
          --method model-mix --mix-width 0.15 --linf-factor 100
    """
    as_json = flags.pop("as_json")
    workers = launch.of_this_process(flags.pop("worker_timeout"))
    with launch.ending_together(workers), _folder_here(flags):
        request = workers.together(lambda: _request(flags))
        if not workers.is_chief:
            _help_chief(request, workers)
            return
        summary = _train(request, workers)
    if as_json:
        click.echo(json.dumps(summary.to_json(), indent=2))
        return
    if summary.metrics:
        click.echo(metrics_text(summary.metrics))
    click.echo(_in_short(summary))
    click.echo(f"results in {summary.run}")


def _in_short(summary: Summary) -> str:
    """Returns the statement in three lines; without a claim, why there is none."""
    fields = summary.statement
    if "claim" not in fields:
        return str(fields["reason"])
    whole = f"{summary.run}/{PRIVACY_TEXT_NAME}"
    if not is_remote(summary.run):
        whole = shlex.join(["dpsgd", "account", str(summary.run)])
    return (
        f"{fields['claim']}\n"
        f"  unit        {fields['privacy_unit']}.\n"
        f"  the rest    theorem, mechanism, and what is not covered: {whole}"
    )


@contextlib.contextmanager
def _folder_here(flags: dict[str, Any]) -> Iterator[None]:
    """Names a temporary folder for a run whose folder is in a store."""
    if not is_remote(flags["out"]):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="dpsgd-run-") as folder:
        flags |= {"store": absolute(flags["out"]), "out": Path(folder)}
        yield


def _train(request: Request, workers: Workers) -> Summary:
    from trainer.run.preflight import check
    from trainer.run.stored_run import fetch

    def fetched_and_checked() -> Checked:
        fetch(request)
        return check(request)

    with Terminal() as reporter:
        checked = workers.together(fetched_and_checked)
        shared_options.warn(
            request.settings.target_delta, checked.manifest.plan.num_examples
        )
        # TensorFlow takes seconds to load, so the request is checked before.
        reporter.say("loading TensorFlow")
        from trainer.train import run_checked

        return run_checked(checked, reporter, workers)


def _help_chief(request: Request, workers: Workers) -> None:
    from trainer.run.preflight import check

    checked = workers.together(lambda: check(request, chief=False))
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
    return _request(flags)


def _request(flags: dict[str, Any]) -> Request:
    settings = setting_flags.take(flags, TrainSettings)
    return Request(
        settings=TrainSettings(
            **settings,
            method=flags["method"],
            method_settings=method_flags.take(flags),
        ),
        **setting_flags.take(flags, Request),
        batches=flags["batches"],
        held_out=flags["eval"],
        run=flags["out"],
        store=flags.get("store"),
    )


@click.command(name="account", cls=method_flags.AccountsForMethods)
@click.argument("runs", type=paths.PATH, nargs=-1, metavar="[RUN]...")
@plan_flags.options
@shared_options.l2_norm_clip("Required with settings of a method.")
@shared_options.max_examples_per_user("State epsilon for users with at most this many.")
@shared_options.relation("Neighbouring relation.  [default: zero-out]")
@click.option(
    "--cross-check",
    is_flag=True,
    help="Also state the epsilon by dp_accounting, and the event it is of.",
)
@click.option(
    "--trade-off",
    is_flag=True,
    help="Also bound the error rates of membership tests.",
)
@shared_options.plot("Also draw the trade-off, such as to a.png.")
@shared_options.as_json
def account(
    runs: tuple[Path, ...],
    as_json: bool,
    cross_check: bool,
    trade_off: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """State the epsilon of a run from its record, or that of a plan.

    Of several runs on one table it states that of all together, whatever was chosen
    from earlier ones, for a total that was fixed before the first: epsilons and deltas
    add, and runs that were declared together by --of-runs count once.

    \b
    Examples, for a run, for two, and for a plan:
      dpsgd account run
      dpsgd account run-1 run-2
      dpsgd account --sampler poisson --num-examples 60000 --batch-size 600 \\
          --epochs 10 --noise-multiplier 1.1 --delta 1e-5 --cross-check
    """
    from trainer.cli import account_body

    more = account_body.More(cross_check=cross_check, trade_off=trade_off, plot=plot)
    if not runs:
        fields, text = account_body.of_plan(flags, more)
    elif len(runs) == 1:
        fields, text = account_body.of_run(runs[0], flags, more)
    else:
        fields, text = account_body.of_runs(runs, flags, more)
    click.echo(json.dumps(fields, indent=2) if as_json else text)
