"""``dpsgd train``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from accounting.cli.command import names_of, of_fields, parse, resolved
from accounting.cli.options import (
    Config,
    Json,
    LocalPath,
    Place,
    warn,
)
from accounting.core.settings import (
    OUTPUT,
    RARE,
    REQUIRED,
    Field,
    OfPrivacy,
)
from pipelines.files.storage import absolute, is_remote
from trainer.claims import launch
from trainer.claims.launch import DEFAULT_TIMEOUT
from trainer.cli.metrics_text import metrics_text
from trainer.core.step.workers import Workers
from trainer.report.progress import Terminal
from trainer.report.run_files import PRIVACY_TEXT_NAME
from trainer.settings import methods
from trainer.settings.methods import MODEL, code
from trainer.settings.requests import Request
from trainer.settings.train_settings import AUTO_LOSS, LOSSES, TrainSettings

if TYPE_CHECKING:  # imports TensorFlow
    from trainer.run.preflight import Checked
    from trainer.train import Summary


@resolved
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainSettings):
    """Settings as the command line gives them, checked beside those of the method."""

    loss: Annotated[str, code("loss", AUTO_LOSS, *LOSSES), MODEL] = AUTO_LOSS

    def __post_init__(self) -> None:
        """Leaves the checks to `settings`."""

    def settings(self, of_method: dict[str, str]) -> TrainSettings:
        """Returns the settings of a run.

        Args:
          of_method: Settings of the method, as texts.

        Raises:
          InputError: a setting is refused.
        """
        names = [field.name for field in dataclasses.fields(TrainSettings)]
        given = {name: getattr(self, name) for name in names}
        given["method_settings"] = methods.of_texts(of_method, lambda: names_of(train))
        return TrainSettings(**given)


def train(
    *,
    batches: Annotated[Place, Parameter(group=REQUIRED)],
    out: Annotated[Place, Parameter(group=REQUIRED)],
    held_out: Annotated[LocalPath | None, Parameter(name="--eval")] = None,
    options: Annotated[TrainOptions, of_fields] = TrainOptions(),
    batches_used_before: Annotated[bool, OfPrivacy, RARE] = False,
    checkpoint_every: Annotated[
        int | None, Field(ge=1), Parameter(group=OUTPUT), RARE
    ] = None,
    worker_timeout: Annotated[float, RARE] = DEFAULT_TIMEOUT,
    config: Config = None,
    as_json: Json = False,
    **of_method: str,
) -> None:
    """Train on batches with DP-SGD; evaluate, export, and state epsilon.

    An interrupted run goes on from its last checkpoint when you give the same command
    again.  Under `mpiexec -n 3 dpsgd train ...`, three workers share each step, with
    the same results as one.  All other settings: docs/command_line.md.

    For example, for DP-SGD and for ModelMix:
      dpsgd train --batches batches --eval data/test --out run \\
          --epsilon 3 --delta 1e-7
      dpsgd train --batches batches --eval data/test --out mixed-run \\
          --epsilon 3 --delta 1e-7 --l2-norm-clip 10 --optimizer sgd \\
          --method model-mix --mix-width 0.15 --linf-factor 100

    Args:
      batches: Folder that `dpsgd batches` wrote, here or in a store.  Of a store
        (s3:// and such) the client's own settings are read from the environment.
      out: New folder, or of this run, interrupted.  Here or in a store.
      held_out: Held-out examples, as Parquet.  They have the columns of the batches,
        such as a split of `dpsgd prepare`.  Their metrics are published without
        protection, so none may be a training example.  Without it nothing is evaluated:
        see `dpsgd evaluate`.
      batches_used_before: Accept batches that another private run has used.  Nothing is
        proven for both runs together, and the privacy statement says so.
      checkpoint_every: Steps between checkpoints.  [default: one per minute]
      worker_timeout: Seconds that a worker waits for the other workers of `mpiexec`;
        must exceed the time of an evaluation.
      of_method: Of the method, such as --bam-radius 0.01.  bam has --bam-radius; dp-sat
        has --sat-radius; model-mix has --mix-width and --linf-factor.
    """
    del config  # read before
    workers = launch.of_this_process(worker_timeout)
    with launch.ending_together(workers), _folder_here(out) as places:

        def request() -> Request:
            return Request(
                settings=options.settings(of_method),
                batches=batches,
                held_out=held_out,
                batches_used_before=batches_used_before,
                checkpoint_every=checkpoint_every,
                **places,
            )

        asked = workers.together(request)
        if not workers.is_chief:
            _help_chief(asked, workers)
            return
        summary = _train(asked, workers)
    if as_json:
        print(json.dumps(summary.to_json(), indent=2))
        return
    if summary.metrics:
        print(metrics_text(summary.metrics))
    print(_in_short(summary))
    print(f"results in {summary.run}")


def train_request(tokens: Sequence[str], **changes: Any) -> Request:
    """Returns the request that ``dpsgd train`` makes.

    Args:
      tokens: Arguments of its command line.
      **changes: Settings that are not among ``tokens``, by field.

    Raises:
      InputError: the command would refuse the options before it reads any file.
    """
    given = parse(train, ["--batches=.", "--out=.", *tokens])
    options = dataclasses.replace(given["options"], **changes)
    return Request(
        settings=options.settings(given.get("of_method", {})),
        batches=given["batches"],
        held_out=given["held_out"],
        run=pathlib.Path(given["out"]),
        batches_used_before=given["batches_used_before"],
        checkpoint_every=given["checkpoint_every"],
    )


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
def _folder_here(out: pathlib.Path | str) -> Iterator[dict[str, Any]]:
    """Returns the folder of a run, a temporary one if it is kept in a store."""
    if not is_remote(out):
        yield {"run": out}
        return
    with tempfile.TemporaryDirectory(prefix="dpsgd-run-") as folder:
        yield {"store": absolute(out), "run": pathlib.Path(folder)}


def _train(request: Request, workers: Workers) -> Summary:
    from trainer.run.preflight import check
    from trainer.run.stored_run import fetch

    def fetched_and_checked() -> Checked:
        fetch(request)
        return check(request)

    with Terminal() as reporter:
        checked = workers.together(fetched_and_checked)
        warn(request.settings.target_delta, checked.manifest.plan.num_examples)
        # TensorFlow takes seconds to load, so the request is checked before.
        reporter.say("loading TensorFlow")
        from trainer.train import run_checked

        return run_checked(checked, reporter, workers)


def _help_chief(request: Request, workers: Workers) -> None:
    from trainer.run.preflight import check

    checked = workers.together(lambda: check(request, chief=False))
    from trainer.train import help_chief

    help_chief(checked, workers)
