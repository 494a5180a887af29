"""ModelMix: every step starts at a hidden random mixture of the last two iterates.

    gap  = w_{k-1} - w_{k-2}
    gap <- s * max(|gap|, tau_k),  s = sign(gap), sign(0) = 1       envelope separation
    w_k  = (w_{k-1} + w_{k-2}) / 2 + (alpha - 1/2) * gap
           - eta_k (1 / b) (sum of clipped gradients at w_{k-1}, plus noise)

in each coordinate, with tau_k = ``mix_width`` * eta_k and alpha uniform in [0, 1].
This is Algorithm 1 of the paper: separation moves both iterates apart by the same
length, which leaves their midpoint where it is, and ``alpha a + (1 - alpha) b`` is the
midpoint plus ``alpha - 1/2`` times the gap.  The gap is not the difference of two
rounded ends, which could be nearer than tau_k.

Formal guarantees:
  - What is mixed is at least tau_k apart in every coordinate, also where the two
    iterates are equal.
  - The mixture gets the noise in double precision, and both are rounded once, together:
    where tau_k is below the precision of a weight, mixtures do not become equal.
  - Every trainable coordinate is mixed, with a coefficient of its own.
  - Gradients are computed at the released iterate w_{k-1}.  The state is w_{k-1},
    w_{k-2} and the number of steps, without noisy gradients or mixtures.
  - w_{-1} differs from w_0 by tau_1 in every coordinate (up to float32 rounding), and
    is a function of public values.
  - tau_k / eta_k is ``mix_width`` in every step, whatever the schedule.
  - A constraint is refused: Algorithm 1 has none, and no mixture would keep it.

Where the iterates are nearer than tau_k, the paper's text moves them apart by tau_k;
its authors' code moves them to a distance of tau_k.  Theorem 4.1 needs a distance of at
least tau_k.  This module does what the code does: it adds less noise and has the same
guarantee.  The paper does not define w_{-1}.  Here it is w_0 plus or minus tau_1, with
public random signs, so that the first mixture has the smallest width and adds no bias
that all coordinates share.

The coefficients must stay secret, as the noise must; both come from the secret of an
attempt.  The theorem is about Gaussian noise; here noise is rounded to a grid (see
``step.grid``) before it is added to the mixture.  Within seven standard deviations, and
at noise multipliers above 0.01, this changes no density by more than one part in a
million.

Public: iterates.  Sensitive: mixing coefficients and gradients.

References:
  Xiao, Wan and Devadas (2023), arXiv:2210.03843, Algorithm 1 and Theorem 4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError, check_float
from trainer.core.step.noise import mixing_coefficients
from trainer.core.tf_compat import raw_variable, tf
from trainer.model.trainable_model import TrainableModel
from trainer.run.hooks import Hooks, MethodOptimizer
from trainer.settings.train_settings import TrainSettings


class MixingOptimizer(MethodOptimizer):
    """Plain SGD from mixtures of the last two iterates.

    Its checkpoints hold rate and number of steps of SGD, and the previous iterate; the
    coefficients of a step are sensitive, and in none.  Keras's SGD would keep the last
    noisy gradient as an unused momentum; the theorem is about releasing iterates alone.

    Args:
      optimizer: Keras's plain SGD, which has the learning rate and counts the steps.
      variables: The trainable variables of Keras, with their initial values.
      mix_width: tau over the learning rate, above 0.
      init_seed: Public seed of the signs of ``w_{-1} - w_0``.

    Raises:
      InputError: ``mix_width`` is out of range, or a variable has a constraint.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        mix_width: float,
        init_seed: int,
    ) -> None:
        check_float("mix_width", mix_width, above=0)
        _check_unconstrained(variables)
        variables = [raw_variable(variable) for variable in variables]
        coefficients = [
            tf.Variable(tf.zeros_like(v), trainable=False) for v in variables
        ]
        super().__init__(optimizer, previous=[], buffers=coefficients)
        self._coefficients, self._width = coefficients, mix_width
        signs, tau = np.random.default_rng(init_seed), mix_width * self._rate()
        self._previous += [
            tf.Variable(
                v + tf.cast(tau, v.dtype) * _signs(signs, v.shape), trainable=False
            )
            for v in variables
        ]

    def build(self, variables: Sequence[Any]) -> None:
        """Does nothing: the constructor creates all state.

        Args:
          variables: The trainable variables.
        """

    def before_step(self, drawn: Sequence[np.ndarray]) -> None:
        """Sets the mixing coefficients of the next step.

        Args:
          drawn: Coefficients in [0, 1], an array of each variable's shape.  Sensitive.
        """
        for variable, value in zip(self._coefficients, drawn, strict=True):
            variable.assign(value)

    def apply_gradients(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Takes a step.

        Args:
          pairs: (noisy mean gradient, variable), in the order of the variables.
        """
        rate = self._rate()
        for (gradient, variable), before, coefficient in zip(
            pairs, self._previous, self._coefficients, strict=True
        ):
            variable = raw_variable(variable)
            latest = tf.identity(variable)
            near, far = (tf.cast(weights, tf.float64) for weights in (latest, before))
            gap = separated_gap(near, far, self._width * rate)
            mixture = (near + far) / 2 + (tf.cast(coefficient, tf.float64) - 0.5) * gap
            moved = mixture - rate * tf.cast(gradient, tf.float64)
            variable.assign(tf.cast(moved, variable.dtype))
            before.assign(latest)
        self._optimizer.iterations.assign_add(1)

    def _rate(self) -> Any:
        return tf.cast(self._optimizer.learning_rate, tf.float64)


def separated_gap(latest: Any, previous: Any, width: Any) -> Any:
    """Returns ``latest - previous`` after envelope separation.

    Args:
      latest: The last iterate of a variable, of any shape.
      previous: The iterate before it, of the same shape.
      width: tau, a scalar above 0: the smallest absolute value of the result.
    """
    gap = latest - previous
    return tf.where(gap >= 0, tf.maximum(gap, width), tf.minimum(gap, -width))


def _check_unconstrained(variables: Sequence[Any]) -> None:
    for variable in variables:
        # A Keras optimizer would project the weights onto it after each step.
        if variable.constraint is not None:
            name = getattr(variable, "path", variable.name)
            raise InputError(
                f"Expected no constraint on {name} for method='model-mix', whose "
                "mixtures would not keep it. Omit it, or take another --method."
            )


def _signs(generator: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return generator.choice(np.array([-1.0, 1.0], np.float32), tuple(shape))


def _linf_factor(model: TrainableModel, settings: TrainSettings) -> float:
    factor: float = settings.method_settings["linf_factor"]
    size = sum(variable.shape.num_elements() for variable in model.variables)
    if factor > size:
        raise InputError(
            f"Expected linf_factor={factor} to be at most {size}, the number of "
            "parameters: above it, rounding to the grid could exceed the cap on each "
            "coordinate. Take a smaller one."
        )
    return factor


def _optimizer_of(
    settings: TrainSettings, optimizer: Any, variables: Sequence[Any]
) -> MixingOptimizer:
    return MixingOptimizer(
        optimizer,
        variables,
        mix_width=settings.method_settings["mix_width"],
        init_seed=settings.init_seed,
    )


HOOKS = Hooks(
    linf_factor=_linf_factor,
    optimizer=_optimizer_of,
    draw=mixing_coefficients,
)
