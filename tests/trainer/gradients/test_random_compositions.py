"""Random compositions of raw operations keep rows apart, and so do their gradients.

Results of random calls are the rows of further calls: reshaped, transposed, packed,
unpacked and gathered in between, with sizes and numbers of entries per example that one
call by itself does not have.  Of each result that `classify` takes for rows, and of the
gradient of a function of it with respect to the placeholder, row i must follow from row
i alone.

Faults that it was seen to find, each planted by itself: entries per example that
``Reshape`` forgets, a batch axis that ``Transpose`` or ``Pack`` leaves where it was.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest

from tests.trainer.gradients.test_random_operations import (
    ERRORS,
    KINDS,
    NUM_ROWS,
    SHAPE,
    Call,
    called,
    is_rows,
)
from trainer.core.tf_compat import tf
from trainer.gradients import row_independence
from trainer.gradients.row_independence import PerRow, classify
from trainer.gradients.traced_losses import with_known_sizes

pytestmark = pytest.mark.thorough

#: Operations that move entries, which half of the calls are of.
_MOVES = ["ConcatV2", "ExpandDims", "GatherV2", "Pack", "Reshape", "Split",
          "StridedSlice", "Tile", "Transpose", "Unpack"]  # fmt: skip
_MOST_CALLS = 60


def _called(kind: str, seed: int, values: Any, made: list[Any]) -> list[Any]:
    """Returns those results of a random call that are rows; no others stay behind."""

    def results_of(values: Any, made: list[Any]) -> list[Any]:
        results = called(kind, Call(kind, np.random.default_rng(seed), values, made))
        kinds = classify(values.graph, [values])
        return [x for x in results if isinstance(kinds[x.name], PerRow)]

    definition = values.graph.as_graph_def(add_shapes=True)
    with tf.Graph().as_default() as tried:
        tf.graph_util.import_graph_def(definition, name="")
        copies = [tried.get_tensor_by_name(x.name) for x in (values, *made)]
        try:
            useful = results_of(copies[0], copies[1:])
        except ERRORS:  # an impossible call
            return []
    return results_of(values, made) if useful else []


def _composed(random: np.random.Generator, values: Any, num_steps: int) -> list[Any]:
    """Returns rows of a chain of random calls, each on results of the last ones."""
    found = [values]
    for step in range(num_steps):
        for _ in range(_MOST_CALLS):
            kind = str(random.choice(_MOVES if random.random() < 0.5 else KINDS))
            seed = int(random.integers(0, 2**31))
            results = _called(kind, seed, values, found[-2:] if step else [])
            if results:
                found.append(results[random.integers(0, len(results))])
                break
    return found[1:]


def _gradients(results: list[Any], values: Any) -> list[Any]:
    """Returns the gradients of functions of results that are floating point."""
    found = []
    for result in results:
        if result.dtype == tf.float32:
            # Of an operation without a gradient, or with one of shapes that do not fit.
            with contextlib.suppress(LookupError, ValueError):
                total = tf.reduce_sum(tf.sin(result) * (1.0 + tf.abs(result)))
                found += tf.gradients(total, [values])
    return [tf.convert_to_tensor(x) for x in found if x is not None]


def _tries(seed: int, num_steps: int = 3) -> tuple[int, int]:
    """Returns how many tensors were said to be rows, and of how many that is wrong."""
    random, said, wrong = np.random.default_rng(seed), 0, 0
    with tf.Graph().as_default() as graph:
        values = tf.compat.v1.placeholder(tf.float32, (None, *SHAPE))
        results = _composed(random, values, num_steps)
        kinds = classify(graph, [values])
        pairs = [(result, kinds[result.name]) for result in results]
        pairs += [(each, PerRow()) for each in _gradients(results, values)]
        with tf.compat.v1.Session(graph=graph) as session:
            for result, kind in pairs:
                with contextlib.suppress(tf.errors.OpError):
                    right = is_rows(session, values, result, kind, random)
                    said, wrong = said + 1, wrong + (not right)
    return said, wrong


def _all_tries(first: int, count: int) -> tuple[int, int]:
    found = np.array([_tries(seed) for seed in range(first, first + count)])
    said, wrong = found.sum(0)
    return int(said), int(wrong)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_results_and_gradients_of_compositions_are_rows(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some constants are of as many rows.
    sized = functools.partial(with_known_sizes, num_rows=NUM_ROWS)
    monkeypatch.setattr(row_independence, "with_known_sizes", sized)
    said, wrong = _all_tries(first, 20)
    assert said >= 20
    assert not wrong
