"""Predicts a costly run from cheap ones: TAN, arXiv:2210.03403, Section 4, Figure 1.

    python examples/papers/simulate.py --input public/train --eval public/test \
        --out simulation --batch-size 4096 --small-batch-sizes 64,128,256 \
        --num-steps 500 --noise-multiplier 1.97 --learning-rates 0.1,0.3 \
        -- --delta 1e-6 --l2-norm-clip 10

``dpsgd plan`` prints the noise multiplier of the large run for an epsilon.  The small
runs have the steps, the learning rate and the ratio of noise to batch size of the large
run.  The metric is extrapolated as a line in log2(batch size), with Student's interval
for one more run.  THE SMALL RUNS ARE NOT PRIVATE: use public data.  The law holds where
the large run's noise multiplier is above 2.  What follows ``--`` goes to ``dpsgd
train``.
"""

from __future__ import annotations

import argparse
import math
import pathlib

import common
import numpy as np
from scipy import stats


def line_through(
    sizes: list[int], values: list[float], size: int, level: float = 0.95
) -> tuple[float, float]:
    """Returns the value of the least-squares line at ``size``, and the half interval.

    Args:
      sizes: Batch size of each run, three or more.
      values: Metric of each run.
      size: Batch size of one more run.
      level: Probability that its metric is within the interval, if the line holds.
    """
    x, y = np.log2(sizes), np.asarray(values)
    centred = x - x.mean()
    squares = float(centred @ centred)
    slope = float(centred @ y) / squares
    residuals = y - y.mean() - slope * centred
    spread = math.sqrt(float(residuals @ residuals) / (len(x) - 2))
    away = math.log2(size) - x.mean()
    quantile = float(stats.t.ppf((1 + level) / 2, len(x) - 2))
    margin = quantile * spread * math.sqrt(1 + 1 / len(x) + away**2 / squares)
    return float(y.mean() + slope * away), margin


def main() -> None:
    """Makes the small runs, and prints and draws the prediction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--small-batch-sizes", required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--noise-multiplier", type=float, required=True)
    parser.add_argument("--learning-rates", default="0.01")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--metric", default="auc")
    asked, of_train = common.parsed(parser)
    sizes = [int(size) for size in asked.small_batch_sizes.split(",")]
    _, axes = common.new_axes()
    for color, rate in enumerate(asked.learning_rates.split(",")):
        points = [(size, seed) for size in sizes for seed in range(asked.seeds)]
        values = []
        for size, seed in points:
            folder = asked.out / f"rate-{rate}-batch-{size}-seed-{seed}"
            batches = ["--input", asked.input, "--sampler", "poisson"]
            batches += ["--batch-size", size, "--num-steps", asked.num_steps]
            noise = asked.noise_multiplier * size / asked.batch_size
            train = ["--eval", asked.eval, "--noise-multiplier", noise]
            train += ["--learning-rate", rate, "--init-seed", seed]
            common.make_run(folder, batches, [*train, *of_train])
            values.append(common.metric_of(folder / "run", asked.metric))
        of_runs = [size for size, _ in points]
        mean, margin = line_through(of_runs, values, asked.batch_size)
        text = f"learning rate {rate}: {mean:.4f} ± {margin:.4f} predicted"
        print(text)
        axes.plot(of_runs, values, "x", color=f"C{color}")
        axes.errorbar(
            [asked.batch_size], [mean], [margin], fmt="o", color=f"C{color}", label=text
        )
    axes.set(xlabel="expected batch size", ylabel=asked.metric, xscale="log")
    axes.legend()
    axes.figure.savefig(asked.out / "simulation.png")


if __name__ == "__main__":
    main()
