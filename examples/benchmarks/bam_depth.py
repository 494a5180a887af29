"""Time of a step against the depth of the model, for BAM.

    python examples/benchmarks/bam_depth.py --out depth [--depths 4,16,64] [--rounds 5]

A benchmark, and no command of `dpsgd`: it measures this machine, and no data of a user.
The model has ``depth`` residual layers of 64 units; the batch is 256 rows of noise.

    dp-sgd            one pass (book-keeping)
    bam sam           a second pass uphill (book-keeping): "BAM SAM" of the paper
    bam sam, copies   the same with a copy of the weights for every example (vectorized)

Each way takes a step in every round, one after the other, so that what else runs meets
them all; the table has the median.  Wall time means something on an idle machine alone;
processor time is the sum over all threads.

References:
  Knolle et al. (2023), arXiv:2308.12018, the figure of run times.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from accounting.plots import new_figure  # noqa: E402
from trainer.claims.bam import bam_gradients  # noqa: E402
from trainer.core.step.clipping import clipped  # noqa: E402
from trainer.core.tf_compat import keras, tf  # noqa: E402
from trainer.gradients.paths import SINGLE_EXAMPLES, clipped_sum  # noqa: E402
from trainer.model.trainable_model import TrainableModel  # noqa: E402
from trainer.report import report  # noqa: E402
from trainer.report.report import DASHES  # noqa: E402

TITLE = "Milliseconds of a step, wall / processor"
ROWS, UNITS, CLIP, RADIUS = 256, 64, 1.0, 0.02


def bam_sum(**how: Any) -> Callable[[TrainableModel], Any]:
    """Returns BAM's sum of clipped gradients of a model."""
    return lambda model: clipped(
        bam_gradients(model, radius=RADIUS, **how), l2_norm_clip=CLIP
    )


#: Way -> the sum of clipped gradients of a model.
WAYS: dict[str, Callable[[TrainableModel], Any]] = {
    "dp-sgd": lambda model: clipped_sum(model, l2_norm_clip=CLIP),
    "bam sam": bam_sum(),
    "bam sam, copies": bam_sum(path=SINGLE_EXAMPLES),
}


def make_model(depth: int) -> TrainableModel:
    """Residual layers, so that gradients reach the first of many."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((UNITS,), name="values")
    values = inputs
    for _ in range(depth):
        values += keras.layers.Dense(UNITS, activation="tanh")(values) / depth
    network = keras.Model(inputs, keras.layers.Dense(1)(values))
    return TrainableModel(network=network, description={})


def measure(depth: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns for each way the median seconds of a step."""
    random, model = np.random.default_rng(0), make_model(depth)
    columns = {
        "values": tf.constant(random.normal(size=(ROWS, UNITS)), tf.float32),
        "label": tf.constant(random.integers(0, 2, ROWS), tf.int8),
    }
    steps, weight = {}, tf.ones(ROWS)
    for name, make in WAYS.items():
        steps[name] = tf.function(make(model), autograph=False)
        steps[name](columns, weight)  # traced here
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, step in steps.items():
            wall, processor = time.perf_counter(), time.process_time()
            tf.nest.map_structure(np.asarray, step(columns, weight))
            seconds = time.perf_counter() - wall, time.process_time() - processor
            found[name].append(seconds)
    return {
        name: dict(
            zip(("wall", "processor"), map(statistics.median, zip(*each, strict=True)),
                strict=True)
        )
        for name, each in found.items()
    }  # fmt: skip


def rows_of(found: dict[int, dict[str, dict[str, float]]]) -> list[list[str]]:
    """Returns milliseconds of a step, wall and processor, of each way and depth."""
    return [
        [str(depth), *(f"{1e3 * each['wall']:.1f} / {1e3 * each['processor']:.1f}"
                       for each in ways.values())]
        for depth, ways in found.items()
    ]  # fmt: skip


def plot(found: dict[int, dict[str, dict[str, float]]], path: pathlib.Path) -> None:
    """Draws wall and processor time over depth."""
    figure, panels = new_figure(10, 4, columns=2)
    for axes, clock in zip(panels, ("wall", "processor"), strict=True):
        for name, marker, dashes in zip(WAYS, "osD", DASHES, strict=False):
            seconds = [1e3 * ways[name][clock] for ways in found.values()]
            axes.plot(list(found), seconds, marker=marker, ls=dashes, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(found), [str(depth) for depth in found])
        axes.set_xlabel("layers")
        axes.set_ylabel(f"{clock} time of a step, ms")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small", handlelength=4)
    figure.suptitle(f"A step of {ROWS} rows, layers of {UNITS} units")
    figure.savefig(path, dpi=120)


def write(found: dict[int, dict[str, dict[str, float]]], out: pathlib.Path) -> None:
    """Writes ``depth.json``, ``depth.md`` and ``depth.png``."""
    (out / "depth.json").write_text(json.dumps(found, indent=2) + "\n")
    table = report.markdown_table(["layers", *WAYS], rows_of(found))
    (out / "depth.md").write_text(f"{TITLE}\n\n{table}\n")
    plot(found, out / "depth.png")


def main() -> None:
    """Measures every depth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--depths", default="2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[int, dict[str, dict[str, float]]] = {}
    for depth in map(int, given.depths.split(",")):
        found[depth] = measure(depth, given.rounds)
        write(found, given.out)
        print(f"{depth} layers measured", file=sys.stderr)
    report.print_table(TITLE, ["layers", *WAYS], rows_of(found), left=[])


if __name__ == "__main__":
    main()
