"""Metrics of the validation data of ``fit``, in the files of a run.

    RUN/curve.json     all points: the step, and the metrics that ``fit`` validated by
    RUN/metrics.json   the last point

They have the form of the files of ``dpsgd train``, so that a report shows them.  The
user says that the data is held out: ``fit`` does not check it.

Formal guarantees:
  - Only metrics of validation data are written, never those of training examples.

Public, if the validation data needs no protection.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.files.json_files import pretty_json
from pipelines.files.storage import write_atomically
from trainer.report.run_files import CURVE_NAME, METRICS_NAME
from trainer.tf_compat import keras, tf


class ValidationCurve:
    """The points of one run.

    Args:
      run: Folder of the run, which exists at the first point.
      method: Name of the training method.
    """

    def __init__(self, run: pathlib.Path, method: str) -> None:
        self._run = run
        self._method = method

    def add(
        self,
        points: list[dict[str, Any]],
        step: int,
        metrics: Mapping[str, Any],
        data: Any,
    ) -> None:
        """Adds a point, and writes both files.

        Args:
          points: The points so far.
          step: Number of executed steps.
          metrics: Name -> value, as Keras's ``evaluate`` returns them.
          data: The validation data of ``fit``.
        """
        # Keras names a metric as compile does: "AUC" is the "auc" of `dpsgd train`.
        numbers = {
            name.lower(): _finite(value)
            for name, value in metrics.items()
            if np.ndim(value) == 0
        }
        points.append({**numbers, "step": step, "num_examples": num_examples(data)})
        curve = {"examples": "held-out", "points": points}
        last = {"examples": "held-out", "method": self._method, **points[-1]}
        last |= {"aggregates": {}, "uncertainty": None}
        for name, found in ((CURVE_NAME, curve), (METRICS_NAME, last)):
            write_atomically(self._run / name, pretty_json(found))


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(float(value)) else None


def num_examples(data: Any) -> int | None:
    """Returns the number of rows of ``(x, y)``; None of a data set, which may be long.

    Example:
      >>> num_examples((np.zeros((5, 2)), np.zeros(5)))
      5
    """
    if not isinstance(data, tuple | list):
        return None
    x, _, _ = keras.utils.unpack_x_y_sample_weight(tuple(data))
    shape = getattr(tf.nest.flatten(x)[0], "shape", None)
    return int(shape[0]) if shape else None
