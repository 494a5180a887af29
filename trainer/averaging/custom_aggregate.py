"""A user's aggregate: ``module:function``, from iterates to weights.

    def median(iterates):
        return [np.median(np.stack(arrays), axis=0) for arrays in zip(*iterates)]

``iterates`` are the last ones, oldest first: during training up to ``tail`` of them,
beginning with the initial weights; of a finished run the kept ones.  Each is a list of
NumPy arrays, the trainable weights in order.  The function returns such a list, of real
numbers.

The function must depend on its argument alone.  Training over an aggregate repeats
steps after a kill: with a different aggregate, a step would be released twice under the
same noise.

Formal guarantees:
  - The function gets only released weights, which it cannot change: its result costs no
    privacy.
  - A function is refused before the first step if it raises, if it returns other shapes
    or numbers that are not finite, or if it returns other bits for the same iterates
    after a call with others.  Later calls are checked for the first two.

Not covered: a function that depends on the time, or on a file that changes.

Public: everything here, if the iterates are public.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, Algorithm 1: ``f_AGG``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from trainer.model.user_code import load_function, one_line_errors
from trainer.settings.aggregation_settings import AggregationSettings

#: The weights of a model, in order.
Weights = Sequence[np.ndarray]


class CustomAggregate:
    """A function of the user's, from iterates to weights, whose results are checked.

    Args:
      spec: "module:function".

    Raises:
      InputError: no such function.
    """

    def __init__(self, spec: str) -> None:
        self._what = f"aggregate={spec!r}"
        self._function = load_function(spec, "aggregate")

    def __call__(self, iterates: Sequence[Weights]) -> list[np.ndarray]:
        """Returns the aggregate of at least one iterate, oldest first.

        Raises:
          InputError: the function raises, or does not return finite weights.
        """
        given = [[_read_only(array) for array in iterate] for iterate in iterates]
        newest = given[-1]
        with one_line_errors(self._what):
            found = [np.asarray(array) for array in self._function(given)]
        shapes = [array.shape for array in newest]
        if [array.shape for array in found] != shapes:
            raise InputError(
                f"Expected {self._what} to return arrays of the shapes of an iterate, "
                f"{_listed(shapes)}; it returned {_listed([a.shape for a in found])}. "
                "Fix it there."
            )
        with one_line_errors(self._what):
            weights = [
                array.astype(like.dtype, casting="same_kind")
                for array, like in zip(found, newest, strict=True)
            ]
        if not all(np.isfinite(array).all() for array in weights):
            raise InputError(
                f"Expected {self._what} to return finite numbers. Fix it there, or try "
                "a smaller --learning-rate."
            )
        return weights

    def check(self, like: Weights, num_iterates: int) -> None:
        """Tries the function on made-up iterates.

        Args:
          like: Weights of the model.
          num_iterates: Number of iterates to call it with.

        Raises:
          InputError: it raises, does not return finite weights, or returns different
            weights for the same iterates.
        """
        random = np.random.default_rng(0)
        ones, others = (
            [
                [random.standard_normal(v.shape).astype(v.dtype) for v in like]
                for _ in range(num_iterates)
            ]
            for _ in range(2)
        )
        first, _, again = self(ones), self(others), self(ones)
        same = (a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
        if not all(same):
            raise InputError(
                f"Expected {self._what} to return the same for the same iterates; it "
                "varies between two calls. Seed its random numbers within the function."
            )


def load(
    settings: AggregationSettings, weights: Sequence[Any]
) -> CustomAggregate | None:
    """Returns the aggregate that settings name, after a trial; None for none.

    Args:
      settings: Settings with ``aggregate`` and its number of iterates.
      weights: Trainable variables of the model.

    Raises:
      InputError: as ``CustomAggregate.check``.
    """
    if settings.aggregate is None:
        return None
    aggregate = CustomAggregate(settings.aggregate)
    like = [np.zeros(v.shape, v.dtype.as_numpy_dtype) for v in weights]
    # The first step has one iterate.
    first = None if settings.tail is None else 1
    for count in (first, settings.tail, settings.keep_last):
        if count is not None:
            aggregate.check(like, count)
    return aggregate


def _read_only(array: np.ndarray) -> np.ndarray:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    shown = ", ".join(map(str, shapes[:4]))
    return f"{len(shapes)}: {shown}{', ...' if len(shapes) > 4 else ''}"
