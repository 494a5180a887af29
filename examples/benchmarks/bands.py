"""What banded noise gains by its rule, beside independent noise, on tables of `untuned`.

    python -m examples.benchmarks.bands --out bands [--epsilon 1] [--table census ...]

Every table is trained by the defaults, on batches of independent noise and on those of
``--bands auto``, with several seeds.  A line has the metric of both, mean and standard
deviation, and the difference with its standard error.  Stopped, it goes on with the same
command.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import cyclopts
import numpy as np

from examples.benchmarks import untuned
from pipelines.batches.folder import read_manifest

TABLES = tuple(name for name in untuned.TABLES if not name.endswith("epsilon 8"))


def _banded(name: str, folder: pathlib.Path, epsilon: float) -> str:
    """Returns the name of the batches with bands by the rule; makes them if missing."""
    batches = f"batches-{epsilon:g}"
    if not (folder / batches / "manifest.json").exists():
        words = untuned.TABLES[name].commands[-1].split()
        words[words.index("--out") + 1] = batches
        words += ["--bands", "auto", "--epsilon", f"{epsilon:g}"]
        subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
    return batches


def _cells(one: np.ndarray, other: np.ndarray) -> str:
    error = np.hypot(one.std(ddof=1), other.std(ddof=1)) / np.sqrt(len(one))
    both = " | ".join(f"{x.mean():.4f} ±{x.std(ddof=1):.4f}" for x in (one, other))
    return f"{both} | {other.mean() - one.mean():+.4f} ±{error:.4f}"


def main(
    *,
    out: pathlib.Path,
    epsilon: tuple[float, ...] = (1.0, 3.0),
    seeds: int = 3,
    table: tuple[str, ...] = TABLES,
) -> None:
    """Prints a Markdown table of both kinds of noise.

    Args:
      out: New folder, or that of an earlier run, here or of `untuned`.
      epsilon: Of every run; may be repeated.
      seeds: Runs of each kind, at least 2.
      table: Name of a data set; may be repeated.
    """
    untuned.find_examples()
    out.mkdir(parents=True, exist_ok=True)
    results = untuned.Results(out / "results.json")
    print("| table | epsilon | bands | metric | independent | banded | difference |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in table:
        folder = untuned.made(name, out)
        for target in epsilon:
            batches = _banded(name, folder, target)
            bands = read_manifest(folder / batches).plan.bands
            if bands is None:
                print(f"| {name} | {target:g} | 1 | the same", flush=True)
                continue
            kinds = [
                untuned.runs_of_defaults(
                    name,
                    folder,
                    results,
                    seeds,
                    fields={"target_epsilon": target},
                    batches=one,
                )
                for one in ("batches", batches)
            ]
            for metric in untuned.metrics_of(name, kinds[0][0]):
                values = (np.array([run[metric] for run in kind]) for kind in kinds)
                cells = f"{name} | {target:g} | {bands} | {metric} | {_cells(*values)}"
                print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    cyclopts.run(main)
