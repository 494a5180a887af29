"""Settings of a training run, and of the averages of its iterates.

The iterate theta_t is the weights after t steps.  Averages are functions of released
iterates, so that no setting of them changes epsilon.  Their names are those of
Recycling Scraps: Shejwalkar et al. (2025), arXiv:2210.01864, sections 3 and 5.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from pydantic import SkipValidation

from accounting.core.claim import AUTO_CLIP
from accounting.core.plan import MOST_RUNS, DpSgdPlan
from accounting.core.settings import (
    OUTPUT,
    RARE,
    RECORDED,
    Field,
    OfPrivacy,
    check_fields,
    choice,
    listed,
    recorded,
)
from accounting.core.validation import InputError, check_claimed_delta, check_int
from trainer.model.metrics import LOSSES, OTHER
from trainer.settings import methods
from trainer.settings.methods import (
    AVERAGES,
    MODEL,
    NON_PRIVATE,
    TRAINING,
    MethodSettings,
    code,
)

if TYPE_CHECKING:
    from accounting.bands import Bands

#: The model made from the schema of prepared data; any other is "module:function".
DEFAULT_MODEL = "default"

#: The usual loss for the label of prepared data.
AUTO_LOSS = "auto"

#: Kind of label in a schema -> the losses that suit it, the usual one first.
LOSSES_OF_LABELS = {
    "binary": ("binary_crossentropy",),
    "classes": ("sparse_categorical_crossentropy",),
    "regression": ("mean_squared_error", "mean_absolute_error", "huber", "log_cosh"),
}

#: The quantile.  Lower ones clip the rare class of an imbalanced label away: see the
#: table in docs/pitfalls.md.
DEFAULT_QUANTILE = 0.9

#: Optimizers whose steps have the size of the learning rate, whatever the gradients'.
#: Noise then moves a weight by the rate times the root of the number of steps: the
#: default rate makes this the same for all runs (see the table in docs/pitfalls.md).
_NORMALIZED = ("adam", "adamw", "nadam", "adamax", "rmsprop")
_NORMALIZED_RATE = 0.15
_OTHER_RATE = 0.1

#: With an automatic clip, noise moves a weight by the rate of plain SGD times noise
#: multiplier over batch size.  The rate makes this two thirds of what it is for Adam,
#: up to a limit; momentum adds ten steps.
_NOISE_OF_SGD = 0.1
_LARGEST_RATE = 10.0
_LEAST_NOISE = 0.5
_OVER_SGD = {"sgd": 1.0, "momentum": 0.1}

#: Adam's floor over the noise of a step's mean.  A rate that grows with the root leaves
#: the noise of the weights as it is.
_FLOOR_OVER_NOISE = 3.0

#: Adam without privacy: its rate times the root of the number of steps, and its floor,
#: without which it learns the rows of rare values by heart (see docs/pitfalls.md).
_PLAIN_RATE = 0.1
_PLAIN_FLOOR = 1e-3

OPTIMIZERS = (
    "sgd", "momentum", "adadelta", "adagrad", "adam", "adamax", "adamw", "ftrl",
    "lion", "nadam", "rmsprop",
)  # fmt: skip

CONSTANT = "constant"
COSINE = "cosine"
LINEAR = "linear"
EXPONENTIAL = "exponential"
TRAPEZOID = "trapezoid"
SCHEDULES = (CONSTANT, TRAPEZOID, COSINE, LINEAR, EXPONENTIAL)

#: When embedding tables get their noise; "auto" is lazy where that is exact and faster.
AUTO_NOISE = "auto"
LAZY_NOISE = "lazy"
DENSE_NOISE = "dense"
EMBEDDING_NOISES = (AUTO_NOISE, LAZY_NOISE, DENSE_NOISE)

#: A norm in single precision loses coordinates below 1e-19; 1e10 of them have a norm of
#: 1e-14, far below this bound.
_LEAST_CLIP = 1e-10

#: Default number of points of the training curve.
_CURVE_POINTS = 10


#: While training: exponential moving average, and uniform tail average.
EMA = "ema"
UTA = "uta"
TRAINING_AVERAGES = (EMA, UTA)

#: Over kept iterates: two averages of weights, and two of outputs.
PAST_EMA = "past_ema"
UPA = "upa"
OPA = "opa"
OMV = "omv"
PAST_WEIGHT_AVERAGES = (PAST_EMA, UPA)

WEIGHT_AVERAGES = (*TRAINING_AVERAGES, *PAST_WEIGHT_AVERAGES)

#: Averages in words.
MEANINGS = {
    EMA: "moving average of the weights",
    UTA: "mean of the last weights, while training",
    PAST_EMA: "moving average of kept weights",
    UPA: "mean of kept weights",
    OPA: "mean of predictions",
    OMV: "majority vote",
}

_K = Parameter(metavar="K")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """Averages of the iterates of a run.  All public.

    Attributes:
      ema_decay: Average the weights while training, as by 0.999.  An exponential moving
        average with warm-up.  Costs no privacy, like all averages
        here.
      tail: Average the weights of the last K steps while training; needs K+2 copies of
        them in memory and in checkpoints.
      train_over: Start each step at this average instead of at the last weights.
      aggregate_from: First step that starts at the average.  [default: 0]
      evaluate_averages: Also evaluate these averages at every point of OUT/curve.json.
      keep_last: Keep K iterates, and evaluate averages of them.  They are in
        OUT/iterates; averages are of their weights and of their predictions.
      keep_every: Steps between kept iterates, of which the last is the final one.
        [default: spread over the second half of the run]
      keep_decay: Decay per iterate of the moving average over kept iterates.
      export: Also export this average of kept weights; may be repeated.
    """

    ema_decay: Annotated[float | None, Field(ge=0, lt=1), RECORDED, AVERAGES] = None
    tail: Annotated[int | None, Field(ge=1), AVERAGES, RARE, _K] = None
    train_over: Annotated[
        str | None, choice("train_over", *TRAINING_AVERAGES), AVERAGES, RARE
    ] = None
    aggregate_from: Annotated[
        int | None, Field(ge=0), AVERAGES, RARE, Parameter(metavar="TAU")
    ] = None
    evaluate_averages: Annotated[bool, AVERAGES, RARE] = False
    keep_last: Annotated[int | None, Field(ge=1), AVERAGES, _K] = None
    keep_every: Annotated[
        int | None, Field(ge=1), AVERAGES, RARE, Parameter(metavar="S")
    ] = None
    keep_decay: Annotated[float, Field(ge=0, lt=1), AVERAGES, RARE] = 0.9
    export: Annotated[
        tuple[Annotated[str, choice("export", *PAST_WEIGHT_AVERAGES)], ...],
        AVERAGES,
        RARE,
    ] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_train_over()
        self._check_past()
        if self.evaluate_averages and not self.averages_every_step:
            raise InputError(
                "--evaluate-averages needs an average: add --ema-decay or --tail."
            )

    def _check_train_over(self) -> None:
        if self.train_over is None:
            if self.aggregate_from is not None:
                raise InputError(
                    f"aggregate_from={self.aggregate_from} does not say at which "
                    "average steps start. Add --train-over."
                )
            return
        if self.train_over not in self._while_training:
            flag = {EMA: "--ema-decay", UTA: "--tail"}
            raise InputError(
                f"train_over={self.train_over!r} needs that average. Add "
                f"{flag[self.train_over]}."
            )

    @property
    def _while_training(self) -> list[str]:
        given = {EMA: self.ema_decay, UTA: self.tail}
        return [name for name, value in given.items() if value is not None]

    def _check_past(self) -> None:
        for name in ("keep_every", "export"):
            if (value := getattr(self, name)) and self.keep_last is None:
                raise InputError(
                    f"{name}={value} is made from kept iterates, and none are kept. "
                    "Add --keep-last."
                )

    @property
    def averages_every_step(self) -> bool:
        """Whether every step reads all weights, which lazy noise does not allow."""
        return self.ema_decay is not None or self.tail is not None

    def kept_steps(self, num_steps: int) -> tuple[int, ...]:
        """Returns the numbers of steps after which an iterate is kept, in order.

        They are known before the run, so that no file has to be removed.

        Example:
          >>> AggregationSettings(keep_last=3, keep_every=20).kept_steps(100)
          (60, 80, 100)
          >>> AggregationSettings(keep_last=5).kept_steps(100)
          (60, 70, 80, 90, 100)

        Raises:
          InputError: the run has too few steps.
        """
        if self.keep_last is None:
            return ()
        every = self.keep_every or max(1, num_steps // (2 * self.keep_last))
        first = num_steps - (self.keep_last - 1) * every
        if first < 1:
            raise InputError(
                f"Expected keep_last={self.keep_last} iterates, {every} steps apart, "
                f"to fit into num_steps={num_steps}. Lower --keep-last or --keep-every."
            )
        return tuple(range(first, num_steps + 1, every))

    def check_steps(self, num_steps: int) -> None:
        """Checks these settings for a run of ``num_steps`` steps.

        Raises:
          InputError: name, value, bound, remedy.
        """
        self.kept_steps(num_steps)
        if self.aggregate_from is not None:
            check_int("aggregate_from", self.aggregate_from, at_most=num_steps - 1)

    def describe_past(self) -> dict[str, Any]:
        """Returns the settings of averages of kept iterates, for the run record."""
        return {} if self.keep_last is None else {"keep_decay": self.keep_decay}

    def describe_feedback(self) -> dict[str, Any]:
        """Returns the settings that change the iterates, for the run record."""
        if self.train_over is None:
            return {}
        return {
            "train_over": self.train_over,
            "aggregate_from": self.aggregate_from or 0,
            "tail": self.tail,
        }


def number_in_words(number: float | str | None) -> str:
    """Returns a clip norm or a learning rate, or "auto", for tables and names."""
    return f"{number:g}" if isinstance(number, (int, float)) else AUTO_CLIP


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings(MethodSettings, AggregationSettings):
    """Training settings: all but batches, held-out examples and keys.  All public.

    ``selection`` is num_runs and shape of `accounting.claims.selection` for
    one of the runs of `dpsgd tune`.

    Attributes:
      target_epsilon: Target epsilon, which determines the noise.
      target_delta: Well below 1 / number of examples.
      allow_large_delta: Accept a delta of 0.01 or more, which protects next to nothing.
      noise_multiplier: Instead of --epsilon.
      of_runs: Noise for so many runs of this plan on this table together, each on
        batches of its own, declared before the first: epsilon is that of all of them.
      l2_norm_clip: Bound on one example's gradient.  auto: follows a
        quantile of the norms, at the same epsilon.  [default: auto]
      clip_quantile: Share of the norms that the automatic clip exceeds; lower ones
        clip rare labels away.  [default: 0.9]
      optimizer: A Keras optimizer, or module:function.  sgd, momentum, adadelta,
        adagrad, adam, adamax, adamw, ftrl, lion, nadam, rmsprop; or a function, which
        takes the learning rate and returns a Keras optimizer.
      learning_rate: Size of a step.  [default: from the plan]  With an automatic clip,
        of a step in units of it.  The default is from the number of steps for adam,
        adamw, nadam, adamax and rmsprop, and with an automatic clip also from noise and
        batch size for sgd and momentum; otherwise 0.1.
      adam_floor: Adam's steps are mean over sqrt(mean of squares + FLOOR^2).  [default:
        3 times the noise of a step, with a learning rate from the plan; 0.001 without
        privacy; otherwise none]
      learning_rate_schedule: Schedule by which the learning rate decays; trapezoid is
        constant for the first half and linear from there.  [default: constant for a
        rate of 0.1 or a given one, and for Adam without privacy; otherwise trapezoid]
      warmup_steps: Steps of linear warm-up of the learning rate.
      final_learning_rate_fraction: Final learning rate of a decaying schedule, as a
        fraction of the initial one.
      model: default, of the schema of the table; or module:function.  The function
        takes the manifest and returns a Keras model whose inputs are named like
        columns of the batches.
      views: Views per example (augmentation multiplicity): the gradient of their mean
        loss is clipped, at the same epsilon.  --augment makes them.
      augment: module:function (columns of one example, seed -> columns of a view).
      loss: auto, by the label in the schema; or one of Keras, or module:function.  auto
        is binary_crossentropy, sparse_categorical_crossentropy or mean_squared_error,
        according to the label.  Keras's are
        binary_crossentropy, sparse_categorical_crossentropy, categorical_crossentropy,
        mean_squared_error, mean_absolute_error, mean_absolute_percentage_error,
        mean_squared_logarithmic_error, huber, log_cosh, poisson; cross-entropies expect
        logits, one per example or one per class.  Labels are the column `label`.  Or
        module:function (labels, outputs -> one number per example).
      metric: Additional metric of held-out examples: module:function (labels,
        predictions as NumPy arrays -> a number).
      embedding_dim: Size of an embedding of the default model.
      hidden: Sizes of the default model's hidden layers.
      init_seed: Seed of the initial weights, which are public.
      initial_weights: Start at these weights: .npz of arrays in order, such as a kept
        iterate, or .keras of the same model, such as ema_model.keras of a run on public
        data.
      initial_weights_are_public: Declare that the initial weights do not depend on the
        training examples.  Weights of another run on these examples do, and the stated
        epsilon does not cover them.
      embedding_noise: lazy, for large tables: rows of embedding tables get their noise
        when they are read; exact only with --optimizer sgd.  auto: lazy where that is
        exact and faster.
      eval_every: Steps between evaluations.  [default: a tenth of all steps]
    """

    target_epsilon: Annotated[
        float | None, Field(gt=0), OfPrivacy, Parameter(name="--epsilon")
    ] = None
    target_delta: Annotated[float | None, OfPrivacy, Parameter(name="--delta")] = None
    allow_large_delta: Annotated[bool, OfPrivacy, RARE] = False
    noise_multiplier: Annotated[float | None, Field(ge=0), OfPrivacy, RARE] = None
    of_runs: Annotated[int, Field(ge=1, le=MOST_RUNS), OfPrivacy, RARE] = 1
    l2_norm_clip: Annotated[
        Annotated[float, Field(ge=_LEAST_CLIP)] | Literal["auto"] | None,
        OfPrivacy,
        Parameter(metavar="C|auto"),
    ] = None
    clip_quantile: Annotated[float | None, Field(ge=0.5, lt=1), OfPrivacy, RARE] = None
    optimizer: Annotated[str, code("optimizer", *OPTIMIZERS), TRAINING] = "adam"
    learning_rate: Annotated[float | None, Field(gt=0), TRAINING, RECORDED] = None
    adam_floor: Annotated[float | None, Field(ge=0), TRAINING, RARE, RECORDED] = None
    learning_rate_schedule: Annotated[
        str | None,
        choice("learning_rate_schedule", *SCHEDULES),
        TRAINING,
        RARE,
        RECORDED,
    ] = None
    warmup_steps: Annotated[int, Field(ge=0), TRAINING, RARE, RECORDED] = 0
    final_learning_rate_fraction: Annotated[
        float, Field(gt=0, le=1), TRAINING, RARE, RECORDED
    ] = 0.01
    model: Annotated[str, code("model", DEFAULT_MODEL), MODEL] = DEFAULT_MODEL
    views: Annotated[int, Field(ge=1), MODEL, RARE] = 1
    augment: Annotated[str | None, code("augment"), MODEL, RARE] = None
    loss: Annotated[str, code("loss", AUTO_LOSS, *LOSSES), MODEL] = (
        "binary_crossentropy"
    )
    metric: Annotated[str | None, code("metric"), MODEL, RARE] = None
    embedding_dim: Annotated[int, Field(ge=1), MODEL, RARE] = 8
    hidden: Annotated[tuple[Annotated[int, Field(ge=1)], ...], MODEL, listed(int)] = (
        64,
        32,
    )
    init_seed: Annotated[int, Field(ge=0, le=2**32 - 1), MODEL, RARE] = 0
    initial_weights: Annotated[str | None, MODEL, RARE, Parameter(metavar="FILE")] = (
        None
    )
    initial_weights_are_public: Annotated[bool, MODEL, RARE] = False
    embedding_noise: Annotated[
        str, choice("embedding_noise", *EMBEDDING_NOISES), TRAINING, RARE
    ] = AUTO_NOISE
    eval_every: Annotated[int | None, Field(ge=1), Parameter(group=OUTPUT), RARE] = None
    selection: Annotated[
        tuple[int, float | None] | None, SkipValidation, Parameter(parse=False)
    ] = None

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        AggregationSettings.__post_init__(self)
        self._check_initial_weights()
        if self.target_delta is not None:
            check_claimed_delta(self.target_delta, allow_large=self.allow_large_delta)
        if self.method == NON_PRIVATE:
            self._check_non_private()
        else:
            self._check_private()
        self._settle_schedule()
        if self.adam_floor is not None and self.optimizer != "adam":
            raise InputError(
                f"adam_floor={self.adam_floor} is of --optimizer adam, not "
                f"{self.optimizer}. Omit it."
            )
        methods.get(self.method).check(self)
        if self.embedding_noise == LAZY_NOISE and self.lazy_obstacle is not None:
            raise InputError(
                "--embedding-noise lazy is not exact here: "
                f"{self.lazy_obstacle}. Omit it for dense noise."
            )

    def _settle_schedule(self) -> None:
        adapts = self.optimizer in _OVER_SGD and self.l2_norm_clip == AUTO_CLIP
        of_plan = self.learning_rate is None and (
            self.optimizer in _NORMALIZED or adapts
        )
        if self.learning_rate is None and not of_plan:  # frozen
            object.__setattr__(self, "learning_rate", _OTHER_RATE)
        if self.learning_rate_schedule is None:
            falls = of_plan and not self._is_plain_adam  # which stops early
            schedule = TRAPEZOID if falls else CONSTANT
            object.__setattr__(self, "learning_rate_schedule", schedule)

    def for_plan(
        self, plan: DpSgdPlan, noise_multiplier: float | None
    ) -> TrainSettings:
        """Returns the settings of a run of a plan, with a learning rate.

        Args:
          plan: Plan of the batches.
          noise_multiplier: Noise multiplier of the run; None without noise.
        """
        if self.learning_rate is not None:
            return self
        root = math.sqrt(plan.num_steps)
        multiplier = max(noise_multiplier or 0.0, _LEAST_NOISE)
        bands = None
        if plan.bands is not None and self.method != NON_PRIVATE:
            from accounting.bands import of_plan  # after --help: SciPy

            bands = of_plan(plan, multiplier)
            multiplier = bands.independent
        noise = multiplier / plan.expected_batch_size
        if self.optimizer in _OVER_SGD:
            rate = min(_LARGEST_RATE, _NOISE_OF_SGD / (noise * root))
            rate *= _OVER_SGD[self.optimizer]
            return dataclasses.replace(self, learning_rate=rate)
        if self._is_plain_adam:
            floor = _PLAIN_FLOOR if self.adam_floor is None else self.adam_floor
            rate = _PLAIN_RATE / root
            return dataclasses.replace(self, learning_rate=rate, adam_floor=floor)
        rate = _NORMALIZED_RATE / root
        if self.optimizer != "adam":
            return dataclasses.replace(self, learning_rate=rate)
        if self.l2_norm_clip != AUTO_CLIP:
            noise *= float(self.l2_norm_clip or 0.0)
        return self._with_floor(rate, noise, bands)

    def _with_floor(
        self, rate: float, noise: float, bands: Bands | None
    ) -> TrainSettings:
        """Returns settings whose floor leaves the noise of the weights as it is.

        With bands, single steps have more noise, and the weights less: the rate grows
        by the root of what it falls.

        Args:
          rate: Learning rate without a floor.
          noise: Standard deviation of the noise of a step's mean, if independent.
          bands: What the bands of the noise gain; None for independent noise.
        """
        floor = self.adam_floor
        if floor is None:
            floor = _FLOOR_OVER_NOISE * noise
        of_step = 1.0
        if bands is not None:
            of_step = bands.of_step / bands.independent
            rate /= math.sqrt(bands.noise)
        rate *= math.hypot(of_step, floor / noise)
        return dataclasses.replace(self, learning_rate=rate, adam_floor=floor)

    @property
    def _is_plain_adam(self) -> bool:
        return self.method == NON_PRIVATE and self.optimizer == "adam"

    @property
    def selection_described(self) -> dict[str, Any]:
        """The law of the number of runs, for the run record; empty for one run."""
        if self.selection is None:
            return {}
        return dict(zip(("num_runs", "shape"), self.selection, strict=True))

    @property
    def lazy_obstacle(self) -> str | None:
        """Why these settings exclude lazy noise; None if they do not."""
        if self.optimizer != "sgd":
            return (
                f"--optimizer {self.optimizer} moves every row at every step, which "
                "--optimizer sgd does not"
            )
        if self.averages_every_step:
            return "--ema-decay and --tail read every row at every step"
        if self.augment is not None:
            return "--augment may change which rows an example reads"
        return methods.get(self.method).whole_tables(self)

    def _check_initial_weights(self) -> None:
        path, is_public = self.initial_weights, self.initial_weights_are_public
        if path is None:
            if is_public:
                raise InputError(
                    "--initial-weights-are-public declares nothing without "
                    "--initial-weights. Add them."
                )
            return
        if not path.endswith((".npz", ".keras")):
            raise InputError(
                f"Expected initial_weights={path!r} to end in .npz or .keras. Save "
                "them by np.savez(file, *arrays), or by Keras's model.save."
            )
        if not is_public:
            raise InputError(
                f"Expected initial_weights={path!r} to be declared public: of weights "
                "that owe anything to the training examples the privacy statement "
                "would be false. Add --initial-weights-are-public if they owe nothing."
            )

    def _check_non_private(self) -> None:
        given = (
            self.target_epsilon,
            self.target_delta,
            self.noise_multiplier,
            self.l2_norm_clip,
            self.clip_quantile,
        )
        if any(value is not None for value in given):
            raise InputError(
                "method='non-private' has no --epsilon, --delta, --noise-multiplier, "
                "--l2-norm-clip or --clip-quantile. Omit them."
            )
        if self.of_runs != 1:
            raise InputError(
                f"Expected of_runs={self.of_runs} to be 1 for method='non-private': "
                "it has no epsilon to share. Omit --of-runs."
            )

    def _check_private(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise InputError(
                "Noise needs either --epsilon with --delta, or --noise-multiplier. "
                "Give one of them."
            )
        if self.target_epsilon is not None and self.target_delta is None:
            raise InputError(
                f"epsilon={self.target_epsilon} is not complete without --delta. Add "
                "it; usual is at most one over the number of examples."
            )
        if self.l2_norm_clip is None:  # frozen
            object.__setattr__(self, "l2_norm_clip", AUTO_CLIP)
        self._check_quantile()

    def _check_quantile(self) -> None:
        if self.l2_norm_clip != AUTO_CLIP:
            if self.clip_quantile is not None:
                raise InputError(
                    f"clip_quantile={self.clip_quantile} is of an automatic clip, and "
                    f"--l2-norm-clip {self.l2_norm_clip} is fixed. Omit one of them."
                )
            return
        if self.clip_quantile is None:  # frozen
            object.__setattr__(self, "clip_quantile", DEFAULT_QUANTILE)

    @property
    def task(self) -> str:
        """Task of the loss; "other" for a user's loss, and for "auto"."""
        return LOSSES.get(self.loss, OTHER)

    def eval_steps(self, num_steps: int) -> int:
        """Returns the number of steps between points of the curve."""
        return self.eval_every or max(1, num_steps // _CURVE_POINTS)

    def describe_optimizer(self) -> dict[str, Any]:
        """Returns the optimizer's name and settings, for the run record."""
        return {
            "name": self.optimizer,
            **recorded(self),
            **self.describe_past(),
            **self.describe_feedback(),
        }
