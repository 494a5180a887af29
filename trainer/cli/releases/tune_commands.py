"""``dpsgd tune``."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from accounting.cli.command import PassedOn, of_fields, parse
from accounting.cli.options import AllowLargeDelta, Json, LocalPath, check_delta
from accounting.core.settings import REQUIRED, OfPrivacy
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of ``dpsgd tune``.

    Attributes:
      source: Training rows: Parquet (a folder, a file or a quoted glob).
      scored: Rows that train nothing, such as the part `val` of `dpsgd prepare`: runs
        are scored on them, with noise.
      out: New folder, or of a stopped search.
      runs: A candidate of the best tenth is tried as surely as by N runs.  How many are
        made is random, secret, and more on average.
      epsilon: Of the model, for one row of --input.
      delta: Of model and score.
      batch_size: Expected rows per step.
      epochs: Epochs of each run.
      epsilon_of_score: Of the best score, for one row of --score; at most --epsilon,
        the default.
      delta_of_score: Of the best score; at most --delta, the default.
      by: What is best.  auto: AUC, accuracy of more than two classes, or the squared
        error of a number.
      others: Also candidates with these options, such as '--hidden 32'; may be
        repeated.
    """

    source: Annotated[str, Parameter(name="--input", group=REQUIRED)]
    scored: Annotated[LocalPath, Parameter(name="--score", group=REQUIRED)]
    out: Annotated[LocalPath, Parameter(group=REQUIRED)]
    runs: Annotated[int, Parameter(metavar="N", group=REQUIRED)]
    epsilon: Annotated[float, Parameter(group=REQUIRED)]
    delta: Annotated[float, Parameter(group=REQUIRED)]
    batch_size: Annotated[int, Parameter(group=REQUIRED)]
    epochs: Annotated[int, Parameter(group=REQUIRED)]
    allow_large_delta: AllowLargeDelta = False
    epsilon_of_score: Annotated[float | None, OfPrivacy] = None
    delta_of_score: Annotated[float | None, OfPrivacy] = None
    by: Literal["auto", "auc", "log_loss", "accuracy", "mean_squared_error"] = "auto"
    others: Annotated[
        tuple[str, ...],
        Parameter(name="--or", metavar="OPTIONS", allow_leading_hyphen=True),
    ] = ()


def tune(
    *rest: PassedOn,
    asked: Annotated[TuneOptions, of_fields],
    as_json: Json = False,
) -> None:
    """Try many settings, and release the best model alone, with one epsilon for all.

    A random number of runs is made, each with a random candidate, and batches and noise
    of its own.  Only the best one is kept.  That costs little more than one run: see
    the price by `dpsgd plan --runs N`.  To resume a stopped search, give the same
    command again.

    All other options go to `dpsgd train`; --learning-rate, --l2-norm-clip and numeric
    settings of a method may be comma-separated lists.  Candidates are all combinations,
    and those with the options of each --or in addition.

    For example:
      dpsgd tune --input data/train --score data/val --out tuned --runs 8 \\
          --epsilon 3 --delta 1e-6 --batch-size 256 --epochs 8 \\
          --learning-rate 0.003,0.01,0.03 --or "--hidden 32"
      dpsgd evaluate tuned/run --batches tuned/batches --input data/test

    Args:
      rest: Options of `dpsgd train`.
    """
    check_delta(asked.delta, asked.allow_large_delta)
    from trainer.releases import tuning  # after --help: pyarrow

    candidates = _candidates(asked, rest)
    with Terminal("tuning", unit="run") as reporter:
        request = tuning.check(
            asked.source,
            asked.scored,
            asked.out,
            candidates=candidates,
            batches=BatchSettings(
                expected_batch_size=asked.batch_size,
                num_epochs=asked.epochs,
                epsilon=max(BatchSettings.epsilon, asked.epsilon),
                delta=asked.delta,
            ),
            num_runs=asked.runs,
            epsilon_of_score=asked.epsilon_of_score,
            delta_of_score=asked.delta_of_score,
            score=asked.by,
            say=reporter.say,
        )
        reporter.say(_price(request.described["price"]))
        found = tuning.tune_checked(request, reporter)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    place = found["winner"]["candidate"]
    chosen = shlex.join(candidate_options(asked, rest)[place]) or "the defaults"
    print(_said(found, chosen, asked.out))


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


def candidate_options(asked: TuneOptions, rest: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the options of each candidate, for `dpsgd train`.

    Args:
      asked: Options of this command.
      rest: Its other arguments.
    """
    return [
        each
        for text in ("", *asked.others)
        for more in [experiment_flags.split("--or", text)]
        for each in experiment_flags.each_of_lists([*rest, *more])
    ]


def candidates_of(tokens: Sequence[str]) -> list[TrainSettings]:
    """Returns the candidates of a command line; nothing is run.

    Raises:
      InputError: the command would refuse the options before it reads a file.
    """
    given = parse(tune, tokens)
    return _candidates(given["asked"], given.get("rest", ()))


def _candidates(asked: TuneOptions, rest: Sequence[str]) -> list[TrainSettings]:
    found = []
    for words in candidate_options(asked, rest):
        experiment_flags.refuse(words, _NOT_HERE)
        request = train_request(
            words,
            target_epsilon=asked.epsilon,
            target_delta=asked.delta,
            allow_large_delta=asked.allow_large_delta,
        )
        found.append(request.settings)
    return found
