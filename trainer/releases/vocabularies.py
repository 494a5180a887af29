"""Vocabularies of columns: the values of enough rows, found without knowing any.

The values of a column are not known beforehand, so that the noisy count of one says
that somebody has it.  Counts are therefore released only above a threshold T, which the
count of a value that one unit alone has exceeds with a chance that is part of delta.

Theorem.  A unit is a row, or a user of at most k rows; c columns have unknown values.
Let one Gaussian release of all counts be (epsilon, delta_g)-private, in which the count
of a value has noise of standard deviation s, rounded to an integer.  With
``Phi((T + 1/2 - a) / s)`` the chance that a value of a rows is not released, let

    c max(-ln Phi((T + 1/2 - k) / s), -k ln Phi((T + 1/2 - 1) / s)) <= ln(1 + delta_v).

Then releasing the counts above T alone, with their values, and all other counts as they
are, is (epsilon, delta_g + delta_v)-private for one unit.

*Proof.*  Let D have one unit more than D'; under zero-out this unit is a ghost in D',
which adds nothing, and else it is not there: the counts are the same.  Let N be the
values that only this unit has, p the chance that the count of one of N is above T, and
B(D), B(D') what is released of all counts but those of N, as if N were not there.  B is
a function of the Gaussian release, and does not depend on the noise of N.

For D' values of N do not exist: M(D') = B(D').  For D none is released with chance
1 - p, independently of the other counts, and then M(D) is B(D).  For any event S,

    P[M(D) in S] <= p + (1 - p) P[B(D) in S] <= p + delta_g + e^epsilon P[M(D') in S].

Conversely P[M(D) in S] >= (1 - p) P[B(D) in S], so that

    P[M(D') in S] <= delta_g + e^epsilon P[B(D) in S]
                  <= delta_g + x + x p / (1 - p),  where x = e^epsilon P[M(D) in S].

If x >= 1 there is nothing to show; else the last term is at most p / (1 - p).  It is
left to show that both p and p / (1 - p) are at most delta_v, which is 1 - p >=
1 / (1 + delta_v).  In one column let the unit have a_i >= 1 rows of each of t values
of N, at most k in all.  Noise is independent, so that the chance that none is released
is exp(-g(a_1) - ... - g(a_t)) with g(a) = -ln Phi((T + 1/2 - a) / s), which increases
and is convex.  For fixed t the sum of g is thus largest with one of k - t + 1 rows and
t - 1 of one row; that is convex in t, hence largest for t = 1 or t = k: for g(k) or
k g(1).  Over c columns the sum is at most c times the larger one.  []

Formal guarantees:
  - ``threshold`` is the least integer that the theorem allows.
  - the counts of a part are exact, and of all parts of a column each row is in one; a
    part has about ``PART_ROWS`` distinct values at most, which bounds memory.
  - equal texts are one value; a missing value is none.

Public: thresholds.  Sensitive: texts and counts.

References:
  Korolova et al. (2009), "Releasing search queries and clicks privately", and Gopi et
  al. (2020), "Differentially private set union", for Gaussian thresholds of which each
  direction is proven for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import special

from pipelines.tables.columns import hash_texts, salt_of

#: Rows of a table whose values are counted at once.
PART_ROWS = 1 << 23
#: Distinct values that wait until they are added to the others.
_WAITING = 1 << 20
_SALT = salt_of("parts of a vocabulary")
_NOTHING = pa.table(
    {"text": pa.array([], pa.large_string()), "rows": pa.array([], pa.int64())}
)


def threshold(stddev: float, num_columns: int, delta: float, *, most: int = 1) -> int:
    """Returns the least T that the theorem allows.

    Args:
      stddev: Standard deviation s of the noise of each count.
      num_columns: Number c of columns with unknown values, at least 1; of all releases.
      delta: The chance delta_v that it may cost, in (0, 1).
      most: Largest number k of rows of one unit.

    Example:
      >>> threshold(20.0, 1, 1e-6)
      96
    """
    # Rounded down by more than the error of the functions below.
    room = math.log1p(delta) / num_columns * (1 - 1e-9)
    ends = (
        rows + stddev * -special.ndtri(-math.expm1(-room / values)) - 0.5
        for rows, values in ((most, 1), (1, most))
    )
    return math.ceil(max(ends))


def num_parts(num_rows: int) -> int:
    """Returns in how many parts the values of a column are counted."""
    return -(-num_rows // PART_ROWS)


def count_texts(texts: pa.ChunkedArray, part: int, parts: int) -> pa.Table:
    """Returns the distinct texts of some rows and their numbers of rows.  Sensitive.

    Args:
      texts: Texts, empty if missing.
      part: Number of the part of the values that are counted.
      parts: Number of parts, from ``num_parts``.
    """
    array = texts.combine_chunks()
    array = array.filter(pc.not_equal(array, ""))
    if parts > 1:
        of_part = hash_texts(array, _SALT) % np.uint64(parts) == part
        array = array.filter(pa.array(of_part))
    found = pc.value_counts(array)
    return pa.table({"text": found.field("values"), "rows": found.field("counts")})


def merged(counts: Iterable[pa.Table]) -> tuple[pa.Array, np.ndarray]:
    """Returns the distinct texts of one part, and the number of rows of each.

    Args:
      counts: Results of ``count_texts`` of different rows.  Sensitive.
    """
    found, waiting = _NOTHING, [_NOTHING]
    for table in counts:
        waiting.append(table)
        if sum(map(len, waiting)) > max(_WAITING, len(found)):
            found, waiting = _sum([found, *waiting]), []
    found = _sum([found, *waiting])
    return found["text"].combine_chunks(), found["rows"].to_numpy()


def _sum(counts: Iterable[pa.Table]) -> pa.Table:
    added = pa.concat_tables(counts).group_by("text").aggregate([("rows", "sum")])
    return pa.table({"text": added["text"], "rows": added["rows_sum"]})
