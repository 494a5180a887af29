"""Files of a model that do not tell what their process computed beside it.

TensorFlow names functions, and what they capture, by a counter of the process, which
every eager tensor advances: in the files of a trained model it told how many physical
batches the training had, hence how many rows Poisson sampling drew.  Keras names what
layers share by its address, and a traced function lists its variables in the order of
theirs.  Where memory is free depends on what was computed and freed before, such as
another run of the process.

Formal guarantees:
  - What is traced in ``own_numbers`` has numbers that depend only on what was traced in
    it before, and what Keras saves in it has numbers of its own.
  - A function lists its variables in the order of its reads, after ``in_order``.
  - A SavedModel with a function that was traced elsewhere is refused.

Not covered: what the user saves without this package, such as by ``network.export``.

Public: the names.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from accounting.core.validation import InputError
from trainer.tf_compat import pywrap_tfe, saved_model_pb2, serialization_lib

#: No process counts so far, so that no other function has one of these names.
_FIRST = 10**15
_NUMBERS = itertools.count(_FIRST)


@contextlib.contextmanager
def own_numbers() -> Iterator[None]:
    """Names take their numbers meanwhile from a counter of exports, not the process."""
    counter = pywrap_tfe.TFE_Py_UID
    pywrap_tfe.TFE_Py_UID = lambda: next(_NUMBERS)
    serialization_lib.id = _numbers()
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_UID = counter
        vars(serialization_lib).pop("id", None)


def _numbers() -> Callable[[Any], int]:
    """Returns what stands in for ``id``: the number of an object among those it saw."""
    # They are kept: else another object could have the address of one.
    seen: dict[int, tuple[int, Any]] = {}
    return lambda one: seen.setdefault(id(one), (len(seen), one))[0]


def in_order(function: Any) -> None:
    """Lets a traced function list its variables in the order in which it reads them.

    Args:
      function: A ``ConcreteFunction``.

    Raises:
      InputError: it watches a variable that it does not read.
    """
    graph = function.graph
    places = {id(handle): place for place, (handle, _) in enumerate(graph.captures)}
    for one in graph.variables:
        if id(one.handle) not in places:
            raise InputError(
                "Expected the network that is exported to read the variables that it "
                f"watches; it does not read {one.name}. Omit what watches it."
            )
    graph.variables = sorted(graph.variables, key=lambda one: places[id(one.handle)])


def check_numbers(saved_model: pathlib.Path) -> None:
    """Checks the names of the functions in a SavedModel.

    Args:
      saved_model: Its folder.

    Raises:
      InputError: one of them tells what the process computed.
    """
    found = saved_model_pb2.SavedModel()
    found.ParseFromString((saved_model / "saved_model.pb").read_bytes())
    ends = [
        function.signature.name.rpartition("_")[2]
        for graph in found.meta_graphs
        for function in graph.graph_def.library.function
    ]
    numbers = [int(end) for end in ends if end.isdigit()]
    if min(numbers, default=0) < _FIRST:
        raise InputError(
            "Expected a network without tf.functions that were traced before its "
            "export: their names tell what was computed. Omit tf.function in layers."
        )
