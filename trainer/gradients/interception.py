"""Replaces the calls of Keras layers while a model runs.

Only the ``call`` of a layer is replaced.  Keras still carries masks, runs nested models
and calls methods of subclasses: the computation is the model's own, not a second
implementation of its layers.

Formal guarantees:
  - Every call of one of the layers is replaced, wherever it occurs in the model.
  - Afterwards the layers have their own calls, also after an exception.

Public: everything here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.tf_compat import tf

#: (layer, inputs) -> outputs.
Call = Callable[[Any, Any], Any]


@contextlib.contextmanager
def intercepted_calls(layers: Sequence[Any], call: Call) -> Iterator[None]:
    """Computes ``call(layer, inputs)`` wherever one of ``layers`` is called.

    Args:
      layers: Distinct layers that take one input.
      call: Function that returns outputs of the shape of the layer's.
    """
    try:
        for layer in layers:
            # Through __dict__: Keras tracks attributes that are assigned.
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
        del args, kwargs  # these layers use neither mask nor training
        return call(layer, inputs)

    return tf.autograph.experimental.do_not_convert(replaced)
