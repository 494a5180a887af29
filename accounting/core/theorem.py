"""The interface of a mechanism that has a privacy theorem of its own.

Most training methods release noisy sums of clipped gradients; `accountant` bounds their
epsilon.  A method that releases something else implements `Theorem`, which answers the
same questions.  ModelMix's is `accounting.claims.model_mix.theorem.Mixing`.

Public: everything.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from accounting.core.intervals import Bounds, NoiseBounds
    from accounting.core.plan import DpSgdPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodWording:
    """Words of a privacy statement where the mechanism differs from DP-SGD.

    Attributes:
      clipped: A second clip, applied before gradients are summed; empty for none.
      released: How the noisy mean is used in what is released.
      discretization: How epsilon is computed; None if as for DP-SGD.
      not_covered: Further outputs that the claim does not cover.
      earlier: What it does not cover of earlier runs; None if as for DP-SGD.
    """

    clipped: str
    released: str
    discretization: str | None
    not_covered: tuple[str, ...] = ()
    earlier: str | None = None


class Theorem(Protocol):
    """A mechanism and its parameters, with privacy bounds of its own.  Hashable.

    Every bound holds for both directions of the zero-out relation and errs on the
    private side.  Every method raises InputError for a value out of range.
    """

    def __hash__(self) -> int:
        """Statements are cached by the parameters of the theorem."""

    @property
    def name(self) -> str:
        """Name of the mechanism, for messages."""

    @property
    def l2_norm_clip(self) -> float | str:
        """Bound on the L2 norm of one example's gradient, or "auto"."""

    @property
    def is_for_rows_alone(self) -> bool:
        """Whether it is not proven for users, even with one row of each."""

    def check_plan(self, plan: DpSgdPlan) -> None:
        """Refuses a plan that the theorem does not cover.

        Raises:
          InputError: nothing is proven for the plan's sampler.
        """

    def epsilon(
        self, plan: DpSgdPlan, *, noise_multiplier: float, delta: float
    ) -> Bounds:
        """Returns bounds on epsilon at ``delta``.

        Args:
          plan: Accepted by ``check_plan``.
          noise_multiplier: Noise standard deviation over ``l2_norm_clip``.
          delta: In (0, 1).
        """

    def delta(
        self, plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float
    ) -> Bounds:
        """Returns bounds on delta at ``epsilon``: a point of the privacy profile.

        Args:
          plan: Accepted by ``check_plan``.
          noise_multiplier: Noise standard deviation over ``l2_norm_clip``.
          epsilon: At least 0.
        """

    def noise_multiplier(
        self, plan: DpSgdPlan, *, epsilon: float, delta: float
    ) -> NoiseBounds:
        """Returns a noise multiplier that suffices for ``(epsilon, delta)``.

        Args:
          plan: Accepted by ``check_plan``.
          epsilon: Target, above 0.
          delta: Target, in (0, 1).
        """

    def wording(self, bounds: Bounds) -> MethodWording:
        """Returns the words for a statement of ``bounds``, a result of ``epsilon``."""
