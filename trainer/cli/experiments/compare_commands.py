"""``dpsgd compare``."""

from __future__ import annotations

import dataclasses
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
    choice,
    listed,
    one_of,
)
from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from trainer.cli.experiments import experiment_flags
from trainer.settings import methods
from trainer.settings.methods import DP_SGD, NON_PRIVATE
from trainer.settings.requests import (
    AUTO_METRIC,
    NOISE_RULES,
    SAME,
    ComparisonSettings,
    Request,
)
from trainer.settings.train_settings import TrainSettings

Rule = Annotated[str, choice("noise", *NOISE_RULES)]
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
      epsilon: Target epsilons.
      noise_multiplier: Noise for all samplers, instead of --epsilon.
      noise: How a target determines noise.  same: the noise of the first sampler, for
        all.  own: the noise proven to suffice for each.  optimistic: the least that
        lower bounds allow for each, without any guarantee.
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
    noise: Annotated[tuple[Rule, ...], OfPrivacy, listed(str)] = (SAME,)
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
          --noise own,optimistic --epsilon 1,2,4 --delta 1e-7 \\
          --batch-size 1024 --epochs 1,5
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
    from trainer.cli.experiments import compare_body  # after --help

    compare_body.run(settings, as_json=as_json)


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
        noise=asked.noise,
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
        own[method] = (*own.get(method, ()), *experiment_flags.split("--for", text))
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
    return [
        experiment_flags.request(tokens, f"--eval={asked.held_out}", **set_here)
        for tokens in experiment_flags.each_of_lists(rest)
    ]
