"""Sums of clipped gradients that the tests of steps and methods share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accounting.core.plan import DpSgdPlan
from trainer.claims.bam import bam_gradients
from trainer.core.step.bounded_sum import BoundedSum, StepSum
from trainer.core.step.clipping import ExampleGradients, GradientSum, clipped
from trainer.core.step.dp_step import Step
from trainer.core.step.grid import AdaptiveClip, Grid
from trainer.core.step.noise import step_noise
from trainer.core.step.workers import Alone
from trainer.gradients.paths import example_gradients
from trainer.model.trainable_model import TrainableModel

_UNIT = 2.0**-30


def plan_of(divisor: int, most: int = 64) -> DpSgdPlan:
    """A plan of steps of ``divisor`` expected examples, and of ``most`` at most."""
    return DpSgdPlan(
        sampler="truncated-poisson",
        num_examples=1000,
        expected_batch_size=divisor,
        num_steps=100,
        truncated_batch_size=most,
    )


def bounded(
    what: TrainableModel | ExampleGradients,
    clip: float | AdaptiveClip,
    divisor: int,
    noise_multiplier: float = 1.0,
    **more: Any,
) -> BoundedSum:
    """The bounded sum of a model's gradients, or of others."""
    if isinstance(what, TrainableModel):
        what = example_gradients(what)
    return BoundedSum(
        what,
        plan_of(divisor),
        l2_norm_clip=clip,
        noise_multiplier=noise_multiplier,
        **more,
    )


def unbounded(function: GradientSum, divisor: int) -> StepSum:
    """A sum in float32, to which a test adds noise in float32."""
    return StepSum(function, plan_of(divisor))


def bam_sum(model: TrainableModel, *, l2_norm_clip: float, **more: Any) -> GradientSum:
    """BAM's sum of clipped gradients; ``more`` as for ``bam_gradients``."""
    return clipped(bam_gradients(model, **more), l2_norm_clip=l2_norm_clip)


class OnGrid(BoundedSum):
    """A sum on a grid that a test chooses, whatever it is a sum of."""

    function: Any

    def __init__(
        self, grid: Grid, divisor: int, function: Any = None, **more: Any
    ) -> None:
        StepSum.__init__(self, function, plan_of(divisor))
        self.set(grid=grid, function=function, **{"bound": 1.0, **more})

    def set(self, **values: Any) -> None:
        """Changes what a sum of a run never does."""
        vars(self).update(values)

    def __call__(self, columns: Any, weight: Any) -> list[Any]:
        assert self.grid is not None
        sums = self.function(columns, weight)
        count = [] if self.adaptive is None else [sums.pop()]
        count = [one * self.adaptive.units(self.grid) for one in count]  # type: ignore[union-attr]
        return [*map(self.grid.on, sums), *count]


def float_noise(
    key: bytes, step: int, shapes: Sequence[Sequence[int]], stddev: float
) -> list[np.ndarray]:
    """The noise of a step as numbers, for a sum that has no grid."""
    found = step_noise(key, step, shapes, stddev, _UNIT)
    return [(_UNIT * one).astype("f4") for one in found]


class StandIn:
    """Stands in for a ``Step``: draws as it does, and keeps no variables."""

    workers = Alone()
    relies_on: tuple[str, ...] = ()
    noise, later_noise = Step.noise, Step.later_noise

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], clip: float, multiplier: float
    ) -> None:
        self.shapes = shapes
        grid = Grid(exponent=-30, clip=clip)
        self.bounded = OnGrid(grid, 1, bound=clip, noise_multiplier=multiplier)

    def of(self, plan: DpSgdPlan) -> Any:
        """Returns this step, of a plan."""
        self.bounded.set(plan=plan)
        return self
