"""Cyclic Poisson subsampling: each example is in the steps of one group alone.

Each example draws one of k groups, uniformly and independently (k is ``plan.bands``).
Step t belongs to group t mod k: each example of that group is in it, independently,
with probability q = b k / n.  So a step has b examples in expectation, and two steps
of one example are at least k apart.  That is what noise of k bands needs:

    y_t = x_t + W_t,  W_t = Z_t - sum of c_j W_(t-j) over 0 < j < k,

with x_t the sum of step t, clip norm 1, c = (1, c_1, ..., c_(k-1)), |c| its L2 norm,
and independent Z_t ~ N(0, (noise_multiplier |c|)^2 I).  With c = (1), or c = (1, 0,
..., 0), it is independent noise.

Theorem.  Releasing all y_t is private with every (epsilon, delta) that the accountant
proves for ``steps_of_an_example(plan)``: ceil(T / k) steps of independent Poisson
sampling with probability q, and independent noise with the same noise multiplier.

Proof.
  1. Bands.  Let C be the lower triangular Toeplitz matrix with C_(s, t) = c_(s - t).
     W = C^-1 Z, so y is a function of C y = C x + Z, and C x + Z one of y: both
     releases are the same.
  2. Groups.  Reveal the group of every example.  They are drawn independently of the
     data and of one another, so neighbours share those of all other examples, and
     hockey-stick divergences are jointly convex: it suffices to prove the theorem for
     fixed groups.  Reveal, too, in which steps all other examples are.
  3. One participation.  The example is in step t, with probability q, only where t is
     of its group g.  It changes C x by the outer product of column t of C and its
     clipped gradient u, |u| <= 1: by at most |c|, in the rows t to t + k - 1 alone.
     These blocks of rows are disjoint for the steps g, g + k, ... of the group, of
     which there are at most ceil(T / k), and rows outside of them do not change.
  4. A block.  u depends on what was released before step t, and not on the block.
     What the other examples add to a row of the block is a function of earlier rows,
     of revealed choices and public settings: it is known, and is taken off.  Given the
     past, the block is thus N(0, (noise_multiplier |c|)^2 I) against its mixture, with
     probability q, with a shift of norm at most |c|: a Poisson-subsampled Gaussian
     mechanism with this noise multiplier.  The next block is one given this one:
     they compose adaptively, as steps of Poisson sampling do.
  5. Under replace-one, shifts u and v of norm at most 1 are mixed in instead of 0 and
     u: the pair is that of Poisson sampling under this relation.

Truncation.  Let M' be the sampler that truncates all steps but those of the example's
group.  Its other steps are the same for neighbours: the theorem holds for M'.  M and M'
differ only if one of at most ceil(T / k) steps of the group holds more than B examples.
Any other example is in such a step with probability q / k = b / n, independently, so a
step does with probability at most Pr[Bin(n - 1, b / n) >= B] =: tau on either data set,
and ``delta <= delta_(M') + (1 + e^eps) ceil(T / k) tau`` as in `truncated_poisson`.
This needs no more than that each data set has at most n examples: under add-or-remove,
n is an upper bound.  Bounds on truncated steps that need the number of other examples
of a step do not apply, since the size of a group is not public.

Users.  The rows of a user may be in several groups, whose blocks overlap: for users
with several rows nothing is proven here.

Several runs begin a new cycle each: N runs are N ceil(T / k) steps of an example, those
of one run of N ceil(T / k) k steps; see `plan.together`.

The integer grid.  Let sums m_t be integers, which an example changes by at most 1 (in
units of the clip) in L2 norm, given the past and all other examples: this change takes
the place of u.  Let c_j be multiples of a 2^-s, s >= 1, Z'_t be Z_t rounded to the
nearest such multiple, plus half of one, and R_t = round(Z'_t - sum of c_j R_(t-j)).
Released is g_t = m_t + R_t.  As m_t is an integer, and no number is halfway between two
integers, g_t = round(m_t + Z'_t - sum of c_j R_(t-j)), and R_(t-j) = g_(t-j) - m_(t-j)
makes it round((C m)_t + Z'_t - sum of c_j g_(t-j)).  (C m)_t is a multiple of 2^-s, so
(C m)_t + Z'_t is (C m + Z)_t rounded like Z_t (with probability 1).  So all g_t are a
function of C m + Z: rounding is post-processing, and costs nothing.  Doubles compute R
without error, see `trainer.core.step.noise`.

A clip that changes.  Each x_t may be in units of a clip norm C_t of its own, if C_t is
a function of what was released before step t: u, divided by C_t, still has norm at most
1, and W, which never knew C_t, is in the same units in all steps.  A count that x_t has
as one more coordinate, within the same norm, is covered like all others.

Going on from a checkpoint, with noise drawn anew: W = Z at the first step after it.
Columns of C are cut off at that border: their norms are at most |c|, and their rows
remain disjoint.  The border may be chosen by the rows before it: who sees a whole block
can leave out its rows from the border on, and put fresh noise, with what the others
add, in their place.  An attempt that was lost released nothing after the border.  So
all of the proof holds.

References:
  Choquette-Choo et al. (2023), arXiv:2306.08153, Theorem 4 (BandMF), with groups of
  equal sizes; their sampling matrices need k to divide n, the groups here need not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from accounting.core import sampler_registry
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    REPLACE_SPECIAL,
)
from accounting.core.plan import DpSgdPlan
from accounting.core.samplers import poisson, truncated_poisson
from accounting.core.samplers.truncated_poisson import TruncatedBounds

#: c_j are multiples of its inverse.
FINE = 1 << 10

#: The theorem of this module, which reduces a run to the steps of one group.
THEOREM = "steps of one group (BandMF, Choquette-Choo et al. 2023, Theorem 4)"


def coefficients(bands: int) -> np.ndarray:
    """Returns c, multiples of ``1 / FINE``.

    They are nearest to the first of the series of ((1 - x) (1 - x/2))^(-1/2), whose
    noise cancels where an optimizer adds up steps with a momentum of one half.  A
    momentum of 0.9 would triple the noise of single steps.

    Args:
      bands: Number of coefficients, at least 1.

    Example:
      >>> coefficients(3).tolist()
      [1.0, 0.75, 0.59375]
    """
    places = np.arange(bands)
    root = np.cumprod(np.where(places, (2 * places - 1) / np.maximum(2 * places, 1), 1))
    found: np.ndarray = np.convolve(root, root / 2.0**places)[:bands]
    return np.rint(found * FINE) / FINE


def steps_of_an_example(plan: DpSgdPlan) -> DpSgdPlan:
    """Returns the plan whose steps are those of the group of an example.

    Its sampling probability is that within the group, as of ``plan``.
    """
    return dataclasses.replace(plan, num_steps=plan.num_group_steps, num_epochs=1)


def _of_group(bound: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a bound on all steps, given one on those of an example's group."""

    @functools.wraps(bound)
    def of_group(plan: DpSgdPlan, *asked: Any) -> Any:
        found = bound(steps_of_an_example(plan), *asked)
        if isinstance(found, Bounds | NoiseBounds):
            found = dataclasses.replace(found, method=f"{THEOREM}: {found.method}")
        if getattr(found, "lower", None) is not None:
            # Noise of bands may be less, and the last steps may be of other groups.
            found = dataclasses.replace(found, lower=None)
        return found

    return of_group


def _cyclic(
    base: sampler_registry.Sampler, wording: sampler_registry.Wording
) -> sampler_registry.Sampler:
    """Returns the `Sampler` of groups, given that of Poisson batches."""
    found = sampler_registry.bounds_of(base).items()
    bounds: dict[str, Any] = {name: _of_group(bound) for name, bound in found}
    return dataclasses.replace(
        base,
        **bounds,
        under={},
        users=None,
        poisson_rate=None,
        wording=wording,
    )


def _truncated(ghosts: bool) -> sampler_registry.Sampler:
    """Returns the `Sampler` of Poisson batches with bounds that need no group sizes."""
    found = TruncatedBounds(
        untruncated=poisson.OF_EXAMPLE,
        additive=truncated_poisson.ADDITIVE,
        mixtures={},
        ghosts=ghosts,
    )
    return dataclasses.replace(
        truncated_poisson.SAMPLER,
        **sampler_registry.bounds_of(found),
        truncation=TRUNCATION,
    )


def _truncation_delta(plan: DpSgdPlan, epsilon: float) -> float:
    return truncated_poisson.truncation_delta(steps_of_an_example(plan), epsilon)


def _smallest_cap(plan: DpSgdPlan, epsilon: float, delta: float) -> int:
    return truncated_poisson.smallest_cap(steps_of_an_example(plan), epsilon, delta)


TRUNCATION = sampler_registry.Truncation(
    untruncated="cyclic-poisson",
    delta=_truncation_delta,
    smallest_cap=_smallest_cap,
    formula="(1 + e^epsilon) ceil(T / k) Pr[Bin(n - 1, b / n) >= B]",
)
_WORDING = dataclasses.replace(
    poisson.WORDING,
    sampling="cyclic Poisson subsampling: each example draws one of as many groups as "
    "bands; a step takes each example of its own group independently",
)
_TRUNCATED_WORDING = dataclasses.replace(
    _WORDING,
    sampling=f"{_WORDING.sampling}; a step with more than truncated_batch_size "
    "examples keeps a uniformly random subset",
)


def _under(relation: str, base: sampler_registry.Sampler, own: Any) -> Any:
    """Returns the `Sampler` under a relation, with that relation's condition on n."""
    words = base.under[relation].wording
    assert words is not None
    wording = dataclasses.replace(own, num_examples=words.num_examples)
    return _cyclic(
        _truncated(False) if base.truncation else base.under[relation], wording
    )


SAMPLER = dataclasses.replace(
    _cyclic(poisson.SAMPLER, _WORDING),
    under={
        relation: _under(relation, poisson.SAMPLER, _WORDING)
        for relation in (ADD_OR_REMOVE_ONE, REPLACE_ONE)
    },
)
TRUNCATED = dataclasses.replace(
    _cyclic(_truncated(True), _TRUNCATED_WORDING),
    relations=(REPLACE_SPECIAL, ADD_OR_REMOVE_ONE),
    under={
        ADD_OR_REMOVE_ONE: _under(
            ADD_OR_REMOVE_ONE, truncated_poisson.SAMPLER, _TRUNCATED_WORDING
        )
    },
)
