"""``dpsgd compare`` and ``dpsgd tune``: many runs, of lists of settings.

Every value of a list is parsed like a single value of that option.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from accounting.cli.command import PassedOn, of_fields
from accounting.cli.options import (
    AllowLargeDelta,
    Json,
    LocalPath,
    Sampler,
    check_delta,
    number_or_auto,
)
from accounting.core.claim import AUTO_CLIP
from accounting.core.plan import DYNAMIC_SHUFFLE, TRUNCATED_POISSON
from accounting.core.settings import (
    RARE,
    REQUIRED,
    Field,
    OfPrivacy,
    listed,
    one_of,
)
from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from trainer.cli.train_command import train_request
from trainer.report.progress import Terminal
from trainer.settings import methods
from trainer.settings.methods import DP_SGD, NON_PRIVATE
from trainer.settings.requests import AUTO_METRIC, ComparisonSettings, Request
from trainer.settings.train_settings import TrainSettings

#: Flags of `dpsgd train` that every experiment sets; a second value would override.
_SET_FOR_ALL = (
    "--batches", "--eval", "--out", "--method", "--epsilon", "--noise-multiplier",
    "--delta", "--of-runs", "--init-seed",
)  # fmt: skip


def refuse(rest: Sequence[str], set_for_all: Sequence[str]) -> None:
    """Refuses flags for `dpsgd train` that a command sets for every run.

    Args:
      rest: Further arguments of the user, for `dpsgd train`.
      set_for_all: Names of the flags that the command sets.

    Raises:
      InputError: ``rest`` has one of them.
    """
    for flag in rest:
        if flag.split("=")[0] in set_for_all:
            raise InputError(f"{flag} is set for every run of this command. Omit it.")


def split(option: str, text: str) -> list[str]:
    """Returns flags that an option gives as one text.

    Args:
      option: The option, for messages.
      text: Flags in shell syntax.

    Raises:
      InputError: a quotation is open.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"Expected the flags {text!r} of {option} in shell syntax: {error}. "
            "Close the quotation."
        ) from None


def each_of_lists(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns arguments of `dpsgd train` for every combination of listed values.

    The learning rate, the clip norm and numeric settings of a method may be lists.  If
    a flag is repeated, its last list counts.

    Example:
      >>> each_of_lists(["--hidden", "4,2", "--learning-rate", "0.1,0.2"])
      [('--hidden', '4,2', '--learning-rate=0.1'), ('--hidden', '4,2', \
'--learning-rate=0.2')]
    """
    kept, lists, words = [], dict[str, list[str]](), iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in _tried():
            kept.append(word)
        elif equals or (value := next(words, "")):
            lists[flag] = value.split(",")
        else:
            kept.append(word)  # without a value: `dpsgd train` refuses it
    return [
        (*kept, *(f"{flag}={one}" for flag, one in zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
    ]


def _tried() -> tuple[str, ...]:
    """Returns the flags whose values may be lists."""
    own = (
        f"--{name.replace('_', '-')}"
        for method in methods.names()
        for name, hint in methods.settings_of(methods.get(method)).items()
        if typing.get_args(hint)[0] in (int, float)
    )
    return ("--learning-rate", "--l2-norm-clip", *own)


Method = Annotated[str, one_of("method", methods.names)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of ``dpsgd compare``.

    Attributes:
      source: Training Parquet: a folder, a file or a quoted glob.
      held_out: Held-out Parquet, such as the test split: a folder, a file or a quoted
        glob.
      out: New folder, or of a stopped run.
      delta: Delta of all targets.
      batch_size: Expected rows per step.
      epochs: Epochs of the batches.
      sampler: Samplers.
      method: Training methods.
      epsilon: Target epsilons: each sampler gets the noise that is proven for it.
      noise_multiplier: Noise for all samplers, instead of --epsilon.
      l2_norm_clip: Clip norm of all private methods, or auto.  [default: auto]
      extra: Options of `dpsgd train` for one method only; may be repeated.
      seeds: Number of repetitions, each with its own batches, initial weights and
        noise.
      metric: Held-out metric; auto: AUC, accuracy or the loss, depending on the label.
    """

    source: Annotated[str, Parameter(name="--input", group=REQUIRED)]
    held_out: Annotated[LocalPath, Parameter(name="--eval", group=REQUIRED)]
    out: Annotated[LocalPath, Parameter(group=REQUIRED)]
    delta: Annotated[float, Parameter(group=REQUIRED)]
    batch_size: Annotated[tuple[int, ...], Parameter(group=REQUIRED), listed(int)]
    epochs: Annotated[tuple[int, ...], Parameter(group=REQUIRED), listed(int)]
    allow_large_delta: AllowLargeDelta = False
    sampler: Annotated[tuple[Sampler, ...], listed(str)] = (
        TRUNCATED_POISSON,
        DYNAMIC_SHUFFLE,
    )
    method: Annotated[tuple[Method, ...], listed(str)] = (DP_SGD, NON_PRIVATE)
    epsilon: Annotated[tuple[float, ...], OfPrivacy, listed(float)] = ()
    noise_multiplier: Annotated[tuple[float, ...], OfPrivacy, listed(float)] = ()
    l2_norm_clip: Annotated[
        tuple[float | Literal["auto"], ...], OfPrivacy, listed(number_or_auto)
    ] = ()
    extra: Annotated[
        tuple[tuple[str, str], ...],
        Parameter(name="--for", metavar="METHOD OPTIONS", allow_leading_hyphen=True),
    ] = ()
    seeds: Annotated[int, Field(ge=1)] = 3
    metric: Annotated[str, RARE] = AUTO_METRIC


def compare(
    *rest: PassedOn,
    asked: Annotated[CompareOptions, of_fields],
    as_json: Json = False,
) -> None:
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
    covers.  All other options go to `dpsgd train`, except those that are set for every
    run, such as --init-seed.

    For example, the question of the paper, and ModelMix and DP-SGD:
      dpsgd compare --input data/train --eval data/test --out comparison \\
          --epsilon 1,2,4 --delta 1e-7 --batch-size 1024 --epochs 1,5
      dpsgd compare --input data/train --eval data/test --out mixed \\
          --sampler truncated-poisson --method dp-sgd,model-mix \\
          --epsilon 3 --delta 1e-7 --batch-size 1024 --epochs 3 \\
          --l2-norm-clip 3,10 --learning-rate 0.1,0.3 --for model-mix \\
          "--optimizer sgd --learning-rate 1,3 --mix-width 0.01,0.1"

    Args:
      rest: Options of `dpsgd train`.
    """
    check_delta(asked.delta, asked.allow_large_delta)
    settings = settings_of(asked, rest)
    from trainer.experiments.compare import compare as compared  # after --help

    found = compared(settings, lambda line: print(line, file=sys.stderr))
    if as_json:
        print(json.dumps(found.fields, indent=2))
        return
    found.show()
    print(f"report in {asked.out / found.stem}.md")


def settings_of(asked: CompareOptions, rest: tuple[str, ...]) -> ComparisonSettings:
    """Returns the comparison.

    Args:
      asked: Options of the command.
      rest: Options of `dpsgd train`.

    Raises:
      InputError: an option is refused, before any file is read.
    """
    own = _options_of_methods(asked)
    requests = [
        request
        for method in asked.method
        for request in _requests(asked, method, (*rest, *own.get(method, ())))
    ]
    every, *others = {request.checkpoint_every for request in requests}
    if others:
        raise InputError(
            "Expected --checkpoint-every to be that of all methods. Give it outside of "
            "--for."
        )
    return ComparisonSettings(
        source=asked.source,
        held_out=asked.held_out,
        out=asked.out,
        seeds=asked.seeds,
        metric=asked.metric,
        checkpoint_every=every,
        samplers=asked.sampler,
        batches=tuple(
            BatchSettings(expected_batch_size=size, num_epochs=epochs)
            for size in asked.batch_size
            for epochs in asked.epochs
        ),
        trained=tuple(
            each
            for request in requests
            for each in _for_targets(request.settings, asked)
        ),
    )


def _for_targets(settings: TrainSettings, asked: CompareOptions) -> list[TrainSettings]:
    if settings.method == NON_PRIVATE:
        return [settings]
    if asked.epsilon:
        return [dataclasses.replace(settings, target_epsilon=e) for e in asked.epsilon]
    noises = asked.noise_multiplier
    return [dataclasses.replace(settings, noise_multiplier=noise) for noise in noises]


def _options_of_methods(asked: CompareOptions) -> dict[str, tuple[str, ...]]:
    if bool(asked.epsilon) == bool(asked.noise_multiplier):
        raise InputError("Expected exactly one of --epsilon and --noise-multiplier.")
    own: dict[str, tuple[str, ...]] = {}
    for method, text in asked.extra:
        if method not in asked.method:
            raise InputError(
                f"Expected --for {method} to name one of the methods compared: "
                f"{', '.join(asked.method)}."
            )
        own[method] = (*own.get(method, ()), *split("--for", text))
    return own


def _requests(
    asked: CompareOptions, method: str, rest: tuple[str, ...]
) -> list[Request]:
    """Returns the requests to `dpsgd train` for the first target."""
    set_here: dict[str, Any] = {"method": method}
    if method != NON_PRIVATE:
        set_here["target_delta"] = asked.delta
        set_here["allow_large_delta"] = asked.allow_large_delta
        set_here["target_epsilon"] = next(iter(asked.epsilon), None)
        set_here["noise_multiplier"] = next(iter(asked.noise_multiplier), None)
        clips = ",".join(map(str, asked.l2_norm_clip or (AUTO_CLIP,)))
        rest = (f"--l2-norm-clip={clips}", *rest)
    found = []
    for tokens in each_of_lists(rest):
        refuse(tokens, _SET_FOR_ALL)
        found.append(train_request([*tokens, f"--eval={asked.held_out}"], **set_here))
    return found


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
      epsilon: Of model and score, for one row of --input or --score.
      delta: Of model and score.
      batch_size: Expected rows per step.
      epochs: Epochs of each run.
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
    print(_describe(found, chosen, asked.out))


def _describe(found: dict[str, Any], chosen: str, out: Path) -> str:
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
        for more in [split("--or", text)]
        for each in each_of_lists([*rest, *more])
    ]


def _candidates(asked: TuneOptions, rest: Sequence[str]) -> list[TrainSettings]:
    found = []
    for words in candidate_options(asked, rest):
        refuse(words, _NOT_HERE)
        request = train_request(
            words,
            target_epsilon=asked.epsilon,
            target_delta=asked.delta,
            allow_large_delta=asked.allow_large_delta,
        )
        found.append(request.settings)
    return found
