"""Names of the claims: what makes a run faster or tighter by a proof of its own.

Without a claim the core computes the same thing, slower or looser, and is the
reference of the claim in the tests (``docs/reviewing.md`` lists them).  A run that used
a claim names it, in its record, its statement and its page.  A name that is not in
``CLAIMS`` is refused, wherever it comes from.

Public: everything here.
"""

from __future__ import annotations

from collections.abc import Iterable

from accounting.core.validation import InputError, check_choice

#: The method without clip and noise, which has no epsilon.
NON_PRIVATE = "non-private"

GRAPH_GRADIENTS = "graph gradients"
LAZY_NOISE = "lazy noise"
BANDED_NOISE = "banded noise"
WORKERS = "workers"
VIEWS = "views"
MOVED_WEIGHTS = "moved weights"
RELEASED_MOVES = "released moves"
HIDDEN_MIXTURES = "hidden mixtures"
SELECTION = "private selection"
OTHER_METHOD = "added method"

#: What is relied on, by name: a sentence for the privacy statement.
CLAIMS = {
    GRAPH_GRADIENTS: "one pass gave the norms and sums of single examples' gradients",
    LAZY_NOISE: "rows of embedding tables got the noise of all steps before anything "
    "read them",
    BANDED_NOISE: "each step took off a part of the noise of the last steps, and no "
    "example was in two of so many steps",
    WORKERS: "several processes added up the sums of one",
    VIEWS: "the views of an example were made of its row alone",
    MOVED_WEIGHTS: "weights were moved for one example by this example alone",
    RELEASED_MOVES: "weights were moved by earlier releases alone",
    HIDDEN_MIXTURES: "mixing coefficients were as the theorem has them, and hidden",
    SELECTION: "runs were as many as their law says, had batches and keys of their "
    "own, and left nothing but the best",
    OTHER_METHOD: "its step, which is not of this project, was a function of one "
    "example and of earlier releases",
}

_REMEDY = "Take the release of dpsgd that has this claim."


def check(names: Iterable[str], *, at_least: int = 0) -> tuple[str, ...]:
    """Returns names of claims, each once and sorted, or refuses them.

    Args:
      names: Names in any order.
      at_least: Smallest number of names.

    Raises:
      InputError: a name is unknown, or there are too few.
    """
    found = tuple(sorted(set(names)))
    for name in found:
        check_choice("relies_on", name, tuple(CLAIMS), remedy=_REMEDY)
    if len(found) < at_least:
        raise InputError(
            "Expected relies_on to name the claim by which these gradients are right. "
            "Name one, or give a function of one example to SingleExamples."
        )
    return found
