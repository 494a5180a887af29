"""``metrics.json`` and ``curve.json`` of a run: as they were written, or refused.

Formal guarantees:
  - What is returned has the fields and types that a run writes.
  - The epsilon of a private evaluation is that of its noise, or more.
  - Numbers of other than held-out examples are refused: they are not private.

Public: everything here.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from typing import Any

from accounting.core.validation import InputError
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.storage import write_atomically
from trainer.report.run_files import METRICS_NAME

_HELD_OUT = "held-out"
_WORDS = ("examples", "method")
_OF_INTERVALS = ("level", "mean_width")
_OF_EVALUATION = (
    "epsilon", "delta", "noise_multiplier", "largest_loss", "larger_losses"
)  # fmt: skip
_ROUNDING = 1e-9
_RESTORE = "Restore it, or train again."


def read_metrics(path: pathlib.Path) -> dict[str, Any]:
    """Returns the metrics of a finished run.

    Args:
      path: Its ``metrics.json``.

    Raises:
      InputError: missing, damaged, edited, or not of held-out examples.
    """
    found = _read(path)
    try:
        points = [found, *found["aggregates"].values()]
        if found["uncertainty"] is not None:
            points.append({name: found["uncertainty"][name] for name in _OF_INTERVALS})
        private = found.get("evaluation")
        if private is not None:
            points += [_checked(private), found["intervals"], *found["calibration"]]
            points.append(dict(enumerate(_ends(found["intervals"]))))
        count = found["num_examples"]  # None: of a data set of unknown length
        sound = (count is None or count >= 0) and all(map(_has_numbers, points))
    except (AttributeError, KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise _edited(path)
    return found


def write_private(run: pathlib.Path, metrics: dict[str, Any]) -> None:
    """Writes the metrics of a private evaluation.

    Args:
      run: Folder of the run, which the caller has locked.
      metrics: JSON-serialisable.
    """
    write_atomically(run / METRICS_NAME, pretty_json(metrics))


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a private evaluation, whose noise gives its epsilon."""
    from accounting.core.pld.gaussian import gaussian_noise  # after --help

    numbers = {name: found[name] for name in _OF_EVALUATION}
    least = gaussian_noise(numbers["epsilon"], numbers["delta"])
    if numbers["noise_multiplier"] < least * (1 - _ROUNDING):
        raise ValueError
    return numbers


def _ends(intervals: dict[str, Any]) -> list[Any]:
    return [end for low, high in intervals.values() for end in (low, high)]


def read_curve(path: pathlib.Path, names: Collection[str]) -> list[dict[str, Any]]:
    """Returns the points of the curve of a run.

    Args:
      path: Its ``curve.json``.
      names: Metrics that each point has.

    Raises:
      InputError: as ``read_metrics``.
    """
    points = _read(path).get("points")
    wanted = {"step", *names}
    if not isinstance(points, list) or not all(
        _has_numbers(point) and wanted <= set(point) for point in points
    ):
        raise _edited(path)
    return points


def _read(path: pathlib.Path) -> dict[str, Any]:
    found = read_json(path, remedy=_RESTORE)
    if not isinstance(found, dict):
        raise _edited(path)
    if found.get("examples") != _HELD_OUT:
        raise InputError(
            f"Expected {path} to say that its examples are {_HELD_OUT}: numbers of "
            "training examples are not private. Restore it, or remove it."
        )
    return found


def _edited(path: pathlib.Path) -> InputError:
    return InputError(
        f"Expected {path} to be as the run wrote it; it was edited. {_RESTORE}"
    )


def _has_numbers(found: Any) -> bool:
    """Whether the values of a point are numbers, not defined, or further fields."""
    return isinstance(found, dict) and all(
        value is None or type(value) in (int, float, list, dict)  # no truth value
        for name, value in found.items()
        if name not in _WORDS
    )
