"""Settings of a training run."""

from __future__ import annotations

import dataclasses
from typing import Any

from accounting import deltas
from accounting.validation import InputError, check_choice, check_float, check_int
from trainer.model.metrics import BINARY, CLASSES, LOSSES, OTHER
from trainer.model.user_code import check_name
from trainer.settings import methods
from trainer.settings.aggregation_settings import AggregationSettings
from trainer.settings.method_settings import NON_PRIVATE, MethodSettings

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

#: Task of the loss -> default clip norm, measured with the default optimizer and
#: learning rate: see the table in docs/pitfalls.md.
DEFAULT_CLIPS = {BINARY: 2.0, CLASSES: 2.0, OTHER: 1.0}

OPTIMIZERS = (
    "sgd", "momentum", "adadelta", "adagrad", "adam", "adamax", "adamw", "ftrl",
    "lion", "nadam", "rmsprop",
)  # fmt: skip

CONSTANT = "constant"
COSINE = "cosine"
LINEAR = "linear"
EXPONENTIAL = "exponential"
SCHEDULES = (CONSTANT, COSINE, LINEAR, EXPONENTIAL)

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings(MethodSettings, AggregationSettings):
    """Training settings: all but batches, held-out examples and keys.  All public.

    ``MethodSettings`` describes those of the method, and ``AggregationSettings`` those
    of the averages of the iterates.

    Attributes:
      target_epsilon: Epsilon for which the noise multiplier is computed, with
        ``target_delta``; None if ``noise_multiplier`` is given.
      target_delta: Delta of the privacy statement, in (0, 1); None for no statement.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      noise_multiplier: Noise standard deviation over ``l2_norm_clip``, at least 0; None
        if ``target_epsilon`` is given.
      l2_norm_clip: Bound on the L2 norm of one example's gradient, at least 1e-10.
        None becomes the default of ``DEFAULT_CLIPS`` as soon as the loss is known.
      optimizer: One of ``OPTIMIZERS``, with Keras's defaults, or "module:function".
      learning_rate: Learning rate, above 0.
      learning_rate_schedule: One of ``SCHEDULES``, by which the rate decays.
      warmup_steps: Steps in which the rate first rises to ``learning_rate``.
      final_learning_rate_fraction: Fraction of the rate at the end of a decaying
        schedule, in (0, 1].
      model: "default", made from the schema of prepared data, or "module:function".
      views: Views per example, whose mean loss is used: columns (views, ...) of the
        batches, or made by ``augment``.
      augment: "module:name" of a function (columns, seed) -> columns of one view, or of
        Keras layers; None if views are columns.
      loss: One of ``metrics.LOSSES``, "module:function", or "auto", which `train` takes
        from the schema of prepared data.
      metric: "module:function" of a further metric of held-out examples; None for none.
      embedding_dim: Size of an embedding of the default model.
      hidden: Sizes of the default model's hidden layers.
      init_seed: Seed of the initial weights, which are public.
      initial_weights: File of initial weights; see ``model.initial_weights``.  None for
        those of ``init_seed``.
      initial_weights_are_public: Whether the user declares that this file does not
        depend on the training examples.
      embedding_noise: One of ``EMBEDDING_NOISES``: when rows of embedding tables get
        their noise.  The distribution of the release does not depend on it.
      eval_every: Steps between points of the curve; a tenth of the run if None.
      simulates: Description of the run that a run of `dpsgd simulate` predicts, for the
        record; empty for other runs.
    """

    target_epsilon: float | None = None
    target_delta: float | None = None
    allow_large_delta: bool = False
    noise_multiplier: float | None = None
    l2_norm_clip: float | None = None
    optimizer: str = "momentum"
    learning_rate: float = 0.1
    learning_rate_schedule: str = CONSTANT
    warmup_steps: int = 0
    final_learning_rate_fraction: float = 0.01
    model: str = DEFAULT_MODEL
    views: int = 1
    augment: str | None = None
    loss: str = "binary_crossentropy"
    metric: str | None = None
    embedding_dim: int = 8
    hidden: tuple[int, ...] = (64, 32)
    init_seed: int = 0
    initial_weights: str | None = None
    initial_weights_are_public: bool = False
    embedding_noise: str = AUTO_NOISE
    eval_every: int | None = None
    simulates: str = ""

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        AggregationSettings.__post_init__(self)
        self._check_optimizer()
        check_choice("embedding_noise", self.embedding_noise, EMBEDDING_NOISES)
        self._check_loss()
        if self.model != DEFAULT_MODEL:
            check_name(self.model, "model")
        if self.metric is not None:
            check_name(self.metric, "metric")
        check_int("views", self.views, at_least=1)
        if self.augment is not None:
            check_name(self.augment, "augment")
        check_int("embedding_dim", self.embedding_dim, at_least=1)
        for size in self.hidden:
            check_int("hidden", size, at_least=1)
        check_int("init_seed", self.init_seed, at_least=0, at_most=2**32 - 1)
        self._check_initial_weights()
        if self.eval_every is not None:
            check_int("eval_every", self.eval_every, at_least=1)
        if self.target_delta is not None:
            deltas.check(self.target_delta, allow_large=self.allow_large_delta)
        if self.method == NON_PRIVATE:
            self._check_non_private()
        else:
            self._check_private()
        methods.get(self.method).check(self)
        if self.embedding_noise == LAZY_NOISE and self.lazy_obstacle is not None:
            raise InputError(
                "Expected --embedding-noise lazy only where it is exact; here "
                f"{self.lazy_obstacle}. Omit it for dense noise."
            )

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
        obstacle = methods.get(self.method).whole_tables(self)
        if obstacle is None and self.non_private_diagnostics:
            return "--non-private-diagnostics reads rows beside the step"
        return obstacle

    def _check_optimizer(self) -> None:
        if ":" not in self.optimizer:
            check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_float("learning_rate", self.learning_rate, above=0)
        schedule, fraction = "learning_rate_schedule", "final_learning_rate_fraction"
        check_choice(schedule, self.learning_rate_schedule, SCHEDULES)
        check_int("warmup_steps", self.warmup_steps, at_least=0)
        check_float(fraction, self.final_learning_rate_fraction, above=0, at_most=1)

    def _check_loss(self) -> None:
        if ":" not in self.loss and self.loss != AUTO_LOSS:
            check_choice("loss", self.loss, tuple(LOSSES))

    def _check_initial_weights(self) -> None:
        path, is_public = self.initial_weights, self.initial_weights_are_public
        if path is None:
            if is_public:
                raise InputError(
                    "Expected --initial-weights beside --initial-weights-are-public: "
                    "which are?"
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
        )
        if any(value is not None for value in given):
            raise InputError(
                "Expected no --epsilon, --delta, --noise-multiplier or --l2-norm-clip "
                "for method='non-private', which has none of them."
            )

    def _check_private(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise InputError(
                "Expected either --epsilon with --delta, or --noise-multiplier."
            )
        if self.target_epsilon is not None:
            check_float("epsilon", self.target_epsilon, above=0)
            if self.target_delta is None:
                raise InputError(
                    f"Expected --delta beside epsilon={self.target_epsilon}. Usual is "
                    "at most one over the number of examples."
                )
        if self.noise_multiplier is not None:
            check_float("noise_multiplier", self.noise_multiplier, at_least=0)
        if self.l2_norm_clip is not None:
            check_float("l2_norm_clip", self.l2_norm_clip, at_least=_LEAST_CLIP)
        elif self.loss != AUTO_LOSS:  # frozen: completed only here
            object.__setattr__(self, "l2_norm_clip", DEFAULT_CLIPS[self.task])

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
            "learning_rate": self.learning_rate,
            "learning_rate_schedule": self.learning_rate_schedule,
            "warmup_steps": self.warmup_steps,
            "final_learning_rate_fraction": self.final_learning_rate_fraction,
            "ema_decay": self.ema_decay,
            **self.describe_past(),
            **self.describe_feedback(),
        }
