"""The sum of a step, which carries the bound that one row cannot exceed.

    release of a step  =  (unit * (m + k)) / b
    m = trunc(sum of clipped gradients / unit)      k = round(N(0, (z C)^2) / unit)

If the plan has bands, k is W of ``noise``, made of normal values of deviation z C |c|.

Bound C, noise z C, bands, grid and divisor b of a run are attributes of one
``BoundedSum``, which is made of the plan.  Step, noise, lazy tables and run record ask
this object, and take such a number from nowhere else: they cannot disagree.

Formal guarantees:
  - One row changes ``unit`` times the value of a ``BoundedSum``, its count included, by
    at most ``bound`` in L2 norm (and the relative 1e-4 of float32 that ``clipping``
    names): it clips to what truncation to the grid leaves of the bound (see ``grid``),
    whatever gradients a method brings.
  - Grid, noise, its bands and divisor are functions of ``bound``, ``plan`` and
    ``noise_multiplier``.  A grid whose clip and rounding exceed the bound is refused.
  - ``relies_on`` names every claim by which the bound holds.  An unknown claim is
    refused, and so are gradients that the core did not form and that name no claim.
  - A ``StepSum`` that is no ``BoundedSum`` has no noise; no private run accepts it.

Public: everything but the value.  Sensitive: the value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from accounting.core.claim import AUTO_CLIP
from accounting.core.plan import DpSgdPlan
from accounting.core.samplers.cyclic_poisson import coefficients
from accounting.core.validation import InputError, check_float
from trainer.core import claim_names
from trainer.core.step import grid
from trainer.core.step.clipping import (
    ExampleGradients,
    GradientSum,
    SingleExamples,
    clipped,
)
from trainer.core.step.grid import AdaptiveClip, Grid
from trainer.core.tf_compat import tf


class StepSum:
    """The sum of a step.  Only a ``BoundedSum`` is private: this has no bound.

    Args:
      function: Sums the gradients of a physical batch, float32.
      plan: Plan of the batches.
    """

    bound: float | None = None
    noise_multiplier: float | None = None
    grid: Grid | None = None
    adaptive: AdaptiveClip | None = None
    bands: tuple[float, ...] = (1.0,)
    plan: DpSgdPlan
    _function: GradientSum
    relies_on: tuple[str, ...] = ()

    def __init__(self, function: GradientSum, plan: DpSgdPlan) -> None:
        vars(self).update(_function=function, plan=plan)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Expected no change of {name}: make another sum.")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __call__(self, columns: Mapping[str, Any], weight: Any) -> list[Any]:
        """Returns the sum of a physical batch: a tensor or slices per variable.

        Args:
          columns: Columns by name, each (batch, ...).
          weight: 1 for examples and 0 for padding, (batch,).
        """
        return self._function(columns, weight)

    @property
    def divisor(self) -> int:
        """The constant that every noisy sum is divided by, whatever a step holds."""
        return self.plan.expected_batch_size

    @property
    def l2_norm_clip(self) -> float | str | None:
        """C, or "auto" if each step has its own clip, in units of which its sum is."""
        return self.bound if self.adaptive is None else AUTO_CLIP

    @property
    def clip_quantile(self) -> float | None:
        """Share of the norms that an automatic clip exceeds; None for a fixed one."""
        return None if self.adaptive is None else self.adaptive.quantile

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the normal values of a coordinate of a step's noise.

        Without bands, these values are the noise itself.
        """
        deviation = (self.noise_multiplier or 0.0) * (self.bound or 0.0)
        return deviation * math.hypot(*self.bands)

    @property
    def unit(self) -> float | None:
        """Distance of the points of the grid; None without a grid."""
        return None if self.grid is None else self.grid.unit

    @property
    def dtype(self) -> Any:
        """Type of the values: float32, or int64 in units of a grid."""
        return tf.float32 if self.grid is None else tf.int64

    def mean(self, total: Any) -> Any:
        """Returns a sum of values over the divisor, float32."""
        if self.grid is None:
            return total / float(self.divisor)
        return self.grid.mean(total, float(self.divisor))

    def adapt(self, count: Any) -> None:
        """Sets the clip of the next step, within a ``tf.function``, if it adapts.

        Args:
          count: Noisy sum of the last value, in units; None for a fixed clip.
        """
        if self.adaptive is not None and self.grid is not None:
            self.adaptive.adapt(count, self.grid, self.plan)


class BoundedSum(StepSum):
    """A sum of clipped gradients on the grid of a run, int64 in units.

    Args:
      gradients: Gradients of single examples, which are clipped here.
      plan: Plan of the batches.
      l2_norm_clip: C, the bound, above 0; or an `AdaptiveClip`, which gives each step
        its own clip.  The sum is then in units of that clip, its bound is 1, and its
        last value is a count.
      noise_multiplier: z, the noise's standard deviation over C, at least 0.
      linf_factor: p, from 1 to the number of values; each coordinate is clipped to the
        clip norm over the root of p.
      relies_on: Further claims that the bound relies on, such as how rows are made.

    Raises:
      InputError: a number is out of range, a claim is unknown, or no grid is fine
        enough.
    """

    def __init__(
        self,
        gradients: ExampleGradients,
        plan: DpSgdPlan,
        *,
        l2_norm_clip: float | AdaptiveClip,
        noise_multiplier: float,
        linf_factor: float = 1,
        relies_on: Iterable[str] = (),
    ) -> None:
        check_float("noise_multiplier", noise_multiplier, at_least=0)
        of_core = type(gradients) is SingleExamples
        claim_names.check(gradients.relies_on, at_least=0 if of_core else 1)
        model = gradients.model
        size = sum(variable.shape.num_elements() for variable in model.variables)
        # Of more than size, rounding to the grid could exceed the cap (see grid).
        check_float("linf factor", linf_factor, at_least=1, at_most=size)
        adaptive, bound = (
            (l2_norm_clip, 1.0)
            if isinstance(l2_norm_clip, AdaptiveClip)
            else (None, l2_norm_clip)
        )
        if adaptive is not None and linf_factor > 1:
            raise InputError(
                f"Expected no cap on coordinates, as of linf_factor={linf_factor}, "
                "beside an automatic clip, whose count is above it. Give "
                "--l2-norm-clip a number."
            )
        bands = tuple(coefficients(plan.bands or 1).tolist())
        found = grid.make(
            l2_norm_clip=bound,
            noise_multiplier=noise_multiplier * math.hypot(*bands),
            num_values=size,
            most_examples=plan.truncated_batch_size or plan.num_examples,
            has_bands=len(bands) > 1,
        )
        _check_bound(found, bound, size)
        of_noise = [claim_names.BANDED_NOISE] if len(bands) > 1 else []
        cap = found.clip / math.sqrt(linf_factor) if linf_factor > 1 else None
        sum_of = clipped(
            gradients, l2_norm_clip=found.clip, linf_norm_clip=cap, adaptive=adaptive
        )
        prepare = model.prepare or dict
        super().__init__(lambda columns, weight: sum_of(prepare(columns), weight), plan)
        vars(self).update(
            bound=bound,
            adaptive=adaptive,
            noise_multiplier=noise_multiplier,
            grid=found,
            bands=bands,
            relies_on=claim_names.check([*gradients.relies_on, *of_noise, *relies_on]),
        )

    def __call__(self, columns: Mapping[str, Any], weight: Any) -> list[Any]:
        """See ``StepSum``; int64 in units of the grid.  Sensitive."""
        assert self.grid is not None
        sums = super().__call__(columns, weight)
        if self.adaptive is None:
            return [self.grid.on(one) for one in sums]
        count = sums.pop() * self.adaptive.units(self.grid)
        return [*map(self.grid.on, sums), count]


def _check_bound(found: Grid, l2_norm_clip: float, size: int) -> None:
    """Refuses a grid that was made for a larger clip."""
    most = found.clip + found.unit * math.sqrt(size)
    if not most <= l2_norm_clip:
        raise InputError(
            f"Expected clip and rounding of the grid, {most!r}, to be at most "
            f"l2_norm_clip={l2_norm_clip!r}. Make the grid for this clip."
        )
