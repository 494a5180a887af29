"""Names in a SavedModel that do not tell what its process computed.

TensorFlow names functions, and what they capture, by a counter of the process, which
every eager tensor advances: in the files of a trained model it told how many physical
batches the training had, hence how many rows Poisson sampling drew.

Formal guarantees:
  - What is traced in ``own_numbers`` has numbers that depend only on what was traced in
    it before.
  - A SavedModel with a function that was traced elsewhere is refused.

Public: the names.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Iterator

from accounting.core.validation import InputError
from trainer.tf_compat import pywrap_tfe, saved_model_pb2

#: No process counts so far, so that no other function has one of these names.
_FIRST = 10**15
_NUMBERS = itertools.count(_FIRST)


@contextlib.contextmanager
def own_numbers() -> Iterator[None]:
    """TensorFlow's names take their numbers from a counter of exports meanwhile."""
    counter = pywrap_tfe.TFE_Py_UID
    pywrap_tfe.TFE_Py_UID = lambda: next(_NUMBERS)
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_UID = counter


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
