"""What the scripts of the papers share: commands of ``dpsgd``, and pictures."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of a script, and those after ``--`` for ``dpsgd train``.

    Args:
      parser: Of the script's own options.
    """
    asked, rest = parser.parse_known_args()
    return asked, [word for word in rest if word != "--"]


def dpsgd(*words: object) -> None:
    """Runs a command of ``dpsgd``, and ends with its error.

    Args:
      *words: The command and its options.
    """
    done = subprocess.run([sys.executable, "-m", "dpsgd", *map(str, words)])
    if done.returncode:
        sys.exit(done.returncode)


def make_run(folder: pathlib.Path, batches: list[object], train: list[object]) -> None:
    """Makes batches and a run on them: ``folder/batches`` and ``folder/run``.

    Args:
      folder: A new folder.
      batches: Options of ``dpsgd batches``.
      train: Options of ``dpsgd train``.
    """
    dpsgd("batches", "--out", folder / "batches", *batches)
    dpsgd("train", "--batches", folder / "batches", "--out", folder / "run", *train)


def metric_of(run: pathlib.Path, metric: str) -> float:
    """Returns a held-out metric of a run, such as ``auc``.

    Args:
      run: Folder of the run.
      metric: Its name in ``metrics.json``.
    """
    fields: dict[str, Any] = json.loads((run / "metrics.json").read_text())
    return float(fields[metric])


def new_axes(columns: int = 1) -> tuple[Any, Any]:
    """Returns a figure and its axes, side by side.

    Args:
      columns: Number of panels.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    size = (5 * columns, 4)
    return pyplot.subplots(1, columns, figsize=size, layout="constrained")
