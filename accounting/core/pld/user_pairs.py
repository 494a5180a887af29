"""Dominating pairs of one step for a user with several rows.

Each of the k rows is sampled with probability q, so that j of them are with probability
``w_j = Binom(k, q)(j)``.  The pair is ``P = sum_j w_j N(a_j, s^2)`` against
``Q = sum_j w_j N(-b_j, s^2)``, for ``a_j, b_j >= 0``.  Without a cap on the rows of a
step, ``a_j = j`` and ``b_j = 0`` if the user is present under P, and the reverse if
absent.  The loss is monotone.

Theorem.  Mixtures ``sum_i w_i N(u_i, s^2 I)`` and ``sum_i w_i N(v_i, s^2 I)`` of
vectors with ``|u_i| <= a_i`` and ``|v_i| <= b_i`` have no larger hockey-stick
divergences than the pair with the same weights.  Those of the pair rise with each a_i
and b_i.  If a_j and b_j rise with j, they also rise if w is replaced by stochastically
larger numbers.

Proof.  In densities relative to N(0, s^2 I), the components are exponential martingales
``X_i = e^(G_i - Var G_i / 2)`` and ``Y_i = e^(H_i - Var H_i / 2)`` of jointly Gaussian
G_i and H_i, whose covariances are the inner products of the means over s^2.  The
divergence at ``e^eps = c`` is ``E g(X, Y)`` for ``g = (sum_i w_i X_i - c sum_i w_i
Y_i)+``, a convex function of a linear one: its second derivatives are at least 0 for
two X or two Y, and at most 0 for an X with a Y.  Along a line between two covariance
matrices, ``E g`` changes by ``E[sum Z_i Z_j g_ij dC_ij] / 2`` over all components Z:
it rises with a covariance of two X or of two Y, variances among them, and falls with
that of an X and a Y.  By Cauchy and Schwarz these are at most ``a_i a_j`` and
``b_i b_j``, and at least ``-a_i b_j`` (over s^2): the covariances of the pair.  Larger
a_i or b_i raise the first two and lower the last.  For the last claim, couple the
smaller number i with the larger one j, and index components by both: the same weights,
and larger means.

References:
  Choquette-Choo et al. (2024), arXiv:2310.15526, and Charles et al. (2024),
  arXiv:2407.07737, for mixtures of Gaussians and user-level sampling of rows.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from accounting.core.pld.dominating_pairs import Pair, Step

#: Probability of improbable numbers of rows: far below any delta.
_LEAST_TAIL = 1e-40


def weights(num_rows: int, sampling_probability: float) -> tuple[float, ...]:
    """Returns the probabilities of sampling 0 ... k rows.

    Args:
      num_rows: k, at least 1.
      sampling_probability: q, in (0, 1).
    """
    counts = np.arange(num_rows + 1)
    return tuple(map(float, stats.binom.pmf(counts, num_rows, sampling_probability)))


def probable(found: NDArray[np.float64]) -> tuple[float, ...]:
    """Returns stochastically larger weights, most of them 0 if few rows are likely.

    Improbable numbers of rows count as all k: few components are left.

    Args:
      found: Probabilities of 0 ... k rows, shape (k + 1,).
    """
    more = np.cumsum(found[::-1])[::-1]  # of as many rows or more
    improbable = more < _LEAST_TAIL
    kept = np.where(improbable, 0.0, found)
    kept[-1] += float(found[improbable].sum())
    return tuple(map(float, kept))


def upper_weights(num_rows: int, sampling_probability: float) -> tuple[float, ...]:
    """Returns `weights` that are stochastically larger; see `probable`.

    Args:
      num_rows: k, at least 1.
      sampling_probability: q, in (0, 1).
    """
    return probable(np.array(weights(num_rows, sampling_probability)))


def steps(
    num_rows: int, sampling_probability: float, noise_multiplier: float
) -> tuple[Step, Step]:
    """Returns one step without a cap in both directions, remove first.

    Args:
      num_rows: k, at least 1.
      sampling_probability: q, in (0, 1).
      noise_multiplier: s, above 0.
    """
    make = functools.partial(
        Pair,
        weights=upper_weights(num_rows, sampling_probability),
        noise_multiplier=noise_multiplier,
    )
    present, absent = tuple(range(num_rows + 1)), (0,) * (num_rows + 1)
    return (
        [(1.0, make(upper=present, lower=absent))],
        [(1.0, make(upper=absent, lower=present))],
    )
