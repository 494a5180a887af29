"""The claim of a run: epsilon with all that it depends on, or a refusal.

`accounting.statement` puts a claim into words.

Formal guarantees:
  - A theorem is stated only for what it is proven for: one example, zero-out, and the
    clip norm of the run.
  - ``relies_on`` names all that the epsilon relies on and that nothing here checks.

Most training methods release noisy sums of clipped gradients; `accountant` bounds their
epsilon.  A method that releases something else implements `Theorem`, which answers the
same questions.  ModelMix's is `accounting.claims.model_mix.Mixing`.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

from accounting.core import accountant, sampler_registry
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import SAMPLERS, DpSgdPlan, together
from accounting.core.validation import (
    InputError,
    check_claimed_delta,
    check_float,
)

#: Parts of the project outside of what a reviewer reads, and what a claim relies on
#: them for.
BATCH_JOB, BOUND_JOB = "batch job", "bound job"
#: Theorems outside of the core that give samplers their epsilon.
ADDED_SAMPLER = "added sampler"
NULL_CLONES, RANDOM_ALLOCATION = "null clones", "random allocation"
RELIANCES = {
    BATCH_JOB: "sampled the batches as the plan says; they are not certified "
    "(`dpsgd verify --resample` does it)",
    BOUND_JOB: "kept at most so many rows of each user, before batches were sampled",
    ADDED_SAMPLER: "its bound, which is not of this project, holds for its batches",
    NULL_CLONES: "other steps hide the step of an example in a shuffle",
    RANDOM_ALLOCATION: "an example is in one uniformly random step of each epoch",
}
#: Instead of a clip norm: each step has its own, which follows a noisy count.
AUTO_CLIP = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodWording:
    """Words of a privacy statement where the mechanism differs from DP-SGD.

    Attributes:
      clipped: A second clip, applied before gradients are summed; empty for none.
      released: How the noisy mean is used in what is released.
      discretization: How epsilon is computed; None if it is computed as for DP-SGD.
      not_covered: Further outputs that the claim does not cover.
      earlier: Earlier runs that the claim does not cover; None for those of DP-SGD.
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
        """Whether the theorem is not proven for users, even with one row of each."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon, and what it is an epsilon of.

    Attributes:
      plan: What was executed.
      noise_multiplier: Noise standard deviation over ``l2_norm_clip``.
      l2_norm_clip: Bound on the L2 norm of one example's gradient; "auto" if it follows
        a count in the noisy sums; None if not stated.
      delta: The delta of the claim.
      epsilon: Bounds on epsilon at ``delta``.
      theorem: The theorem of a method with accounting of its own; None for DP-SGD's.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the privacy unit is a user.
      unit: The privacy unit in words, if the batches record it: a user with at most k
        examples after `dpsgd prepare`.  Else None.
      batches_certified: Whether a certificate is about the batches of the run; None for
        a plan without batches.
      claims: What the run did by proofs of their own: name -> what is relied on.
      of_runs: Number of runs of the plan that epsilon is of, all together.
    """

    plan: DpSgdPlan
    noise_multiplier: float
    l2_norm_clip: float | str | None
    delta: float
    epsilon: Bounds
    theorem: Theorem | None = None
    neighboring_relation: str = REPLACE_SPECIAL
    max_examples_per_user: int = 1
    unit: str | None = None
    batches_certified: bool | None = None
    claims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    of_runs: int = 1

    @property
    def plan_of_all(self) -> DpSgdPlan:
        """The plan whose epsilon is that of all runs; see `plan.together`."""
        return together(self.plan, self.of_runs)

    @property
    def is_guarantee(self) -> bool:
        """Whether a finite epsilon is proven."""
        return self.epsilon.upper is not None and math.isfinite(self.epsilon.upper)

    @property
    def methods(self) -> tuple[str, ...]:
        """The theorems behind what is stated."""
        return (self.epsilon.method,)

    @property
    def relies_on(self) -> tuple[str, ...]:
        """Names of ``RELIANCES`` that nothing checked, and of ``claims``."""
        relied = {
            BATCH_JOB: self.batches_certified is False,
            BOUND_JOB: self.unit is not None,
            ADDED_SAMPLER: self.plan.sampler not in SAMPLERS,
        }
        jobs = (name for name, is_relied in relied.items() if is_relied)
        claims = sampler_registry.get(self.plan.sampler).claims
        found = dict.fromkeys(claims[each] for each in self.methods if each in claims)
        return (*jobs, *found, *self.claims)


def plan_of_all(plan: DpSgdPlan, of_runs: int, theorem: Theorem | None) -> DpSgdPlan:
    """Returns the plan whose epsilon is that of several runs together.

    Args:
      plan: The plan of each run.
      of_runs: Number of runs.
      theorem: The theorem of the training method; None for DP-SGD's.

    Raises:
      InputError: the theorem is of one run, or as for `plan.together`.
    """
    if theorem is not None and of_runs != 1:
        raise InputError(
            f"Expected of_runs={of_runs} to be 1 for {theorem.name}: its theorem is of "
            "one run with its settings, which other runs need not have. Omit --of-runs."
        )
    return together(plan, of_runs)


def check_unit(
    theorem: Theorem,
    max_examples_per_user: int,
    neighboring_relation: str = REPLACE_SPECIAL,
) -> None:
    """Refuses a theorem that is not proven for the privacy unit, or the relation.

    Args:
      theorem: The theorem of the training method.
      max_examples_per_user: k; above 1 the privacy unit is a user.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.

    Raises:
      InputError: the theorem is for one example, under zero-out.
    """
    if max_examples_per_user > 1:
        raise InputError(
            f"Expected max_examples_per_user={max_examples_per_user} to be 1 for "
            f"{theorem.name}: its theorem is proven for one example. Omit it, or bound "
            "users to 1 example."
        )
    if neighboring_relation != REPLACE_SPECIAL:
        raise InputError(
            f"Expected neighboring_relation={neighboring_relation!r} to be "
            f"{REPLACE_SPECIAL!r} for {theorem.name}: its theorem is proven for "
            "zero-out. Omit the relation."
        )


def claim_of(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    l2_norm_clip: float | str | None = None,
    theorem: Theorem | None = None,
    allow_large_delta: bool = False,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
    unit: str | None = None,
    of_runs: int = 1,
) -> Claim:
    """Returns the claim for a run that executed ``plan``, or for several together.

    Args:
      plan: What was executed.
      noise_multiplier: Noise standard deviation over ``l2_norm_clip``.
      delta: The delta of the claim, in (0, 1).
      l2_norm_clip: Bound on the L2 norm of one example's gradient, or "auto"; None to
        leave it out.  With ``theorem`` it must be the theorem's.
      theorem: The theorem of a method with accounting of its own; None for DP-SGD's.
      allow_large_delta: Whether to accept `LARGEST_DELTA` or more.
      neighboring_relation: One of `neighboring_relation.RELATIONS`; with ``theorem``
        only zero-out.
      max_examples_per_user: k; above 1 the privacy unit is a user.
      unit: As in `Claim`.
      of_runs: As in `Claim`.

    Raises:
      InputError: a value out of range, a clip norm other than the theorem's, or a
        relation or number of runs that is not accounted for.
    """
    check_claimed_delta(delta, allow_large=allow_large_delta)
    if l2_norm_clip not in (None, AUTO_CLIP):
        check_float("l2_norm_clip", l2_norm_clip, above=0.0)  # type: ignore[arg-type]
    if theorem is not None:
        check_unit(theorem, max_examples_per_user, neighboring_relation)
        # A theorem's parameters have the clip norm as their unit.
        if theorem.l2_norm_clip != l2_norm_clip:
            raise InputError(
                f"Expected l2_norm_clip={l2_norm_clip!r} to be that of {theorem.name}, "
                f"{theorem.l2_norm_clip!r}. Give both the clip norm of the run."
            )
    of_all = plan_of_all(plan, of_runs, theorem)
    asked: Any = {"noise_multiplier": noise_multiplier, "delta": delta}
    if theorem is None:
        epsilon = accountant.epsilon(
            of_all,
            **asked,
            neighboring_relation=neighboring_relation,
            max_examples_per_user=max_examples_per_user,
        )
    else:
        epsilon = theorem.epsilon(of_all, **asked)
    return Claim(
        plan=plan,
        noise_multiplier=float(noise_multiplier),
        l2_norm_clip=l2_norm_clip,
        delta=float(delta),
        epsilon=epsilon,
        theorem=theorem,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
        unit=unit,
        of_runs=of_runs,
    )
