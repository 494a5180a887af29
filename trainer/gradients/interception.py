"""Calls of Keras layers, replaced while a model runs.

A layer's ``call`` is another function for a while; Keras still does all else: it
carries masks, nests models, runs methods of subclasses.  So a replaced call is in the
very computation that the model is, and not in a second walk over its layers.

Formal guarantees:
  - Every call of one of the layers is replaced, wherever in the model it happens.
  - Afterwards the layers are what they were, also after an exception.

Public: everything here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.tf_compat import tf

#: (layer, its input) -> its output.
Call = Callable[[Any, Any], Any]


@contextlib.contextmanager
def intercepted_calls(layers: Sequence[Any], call: Call) -> Iterator[None]:
    """Computes ``call(layer, inputs)`` wherever one of ``layers`` is called.

    Args:
      layers: Distinct layers of one input.
      call: Gives what the layer would, or something of the same shape.
    """
    try:
        for layer in layers:
            # Through __dict__: Keras would track what is assigned.
            vars(layer)["call"] = _replacement(layer, call)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("call", None)


def _replacement(layer: Any, call: Call) -> Any:
    original = layer.call

    # The signature of the original: Keras looks for ``mask`` and ``training`` in it.
    @functools.wraps(original)
    def replaced(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs  # neither a mask nor the phase changes these layers
        return call(layer, inputs)

    return tf.autograph.experimental.do_not_convert(replaced)
