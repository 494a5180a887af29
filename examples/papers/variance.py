"""Holds the spread of one run's iterates against that of independent runs.

    python examples/papers/variance.py --input data/train --eval data/test \
        --out variance --seeds 6 --batch-size 128 --num-steps 1500 --keep-last 8 \
        --keep-every 150 -- --noise-multiplier 1 --delta 1e-6 --l2-norm-clip 1

Section 5 of arXiv:2210.01864: the iterates of one private run estimate at no cost how
much its predictions vary with the noise.  EVERY RUN COSTS ITS EPSILON: on private data
they cost the sum.  What follows ``--`` goes to ``dpsgd train``.
"""

from __future__ import annotations

import argparse
import pathlib

import common
import numpy as np
import pyarrow.parquet as pq
from scipy.stats import f as fisher

#: In the paper, both standard deviations are within this factor of each other.
FACTOR = 2.0


def summary(last: np.ndarray, spreads: np.ndarray, num_iterates: int) -> list[str]:
    """Returns the comparison of both standard deviations, in words.

    Args:
      last: Predictions of the last weights, shape (runs, examples).
      spreads: Standard deviations over the iterates of each run, of that shape.
      num_iterates: Number of kept iterates of a run.
    """
    of_runs = last.std(0, ddof=1)
    ratios = (spreads[:, of_runs > 0] / of_runs[of_runs > 0]).ravel()
    variances = (spreads**2).mean(1) / (of_runs**2).mean()
    within = ((ratios >= 1 / FACTOR) & (ratios <= FACTOR)).mean()
    # If both estimated one variance of normal predictions: Fisher's F distribution.
    degrees = num_iterates - 1, len(last) - 1
    low, high = fisher.cdf([FACTOR**-2, FACTOR**2], *degrees)
    return [
        f"standard deviation over runs {of_runs.mean():.4g}, of iterates "
        f"{spreads.mean():.4g}",
        f"variance of iterates over that of runs {variances.mean():.2f} "
        f"({variances.min():.2f} to {variances.max():.2f})",
        f"within a factor {FACTOR:g}: {within:.0%} of the examples; "
        f"{high - low:.0%} if both estimated one variance",
    ]


def main() -> None:
    """Makes the runs, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--keep-last", type=int, default=10)
    parser.add_argument("--keep-every", type=int, default=10)
    asked, of_train = common.parsed(parser)
    last, spreads = list[np.ndarray](), list[np.ndarray]()
    for seed in range(asked.seeds):
        folder = asked.out / f"seed-{seed}"
        batches = ["--input", asked.input, "--batch-size", asked.batch_size]
        train = ["--keep-last", asked.keep_last, "--keep-every", asked.keep_every]
        train += of_train
        common.make_run(folder, [*batches, "--num-steps", asked.num_steps], train)
        for found, column, more in (
            (last, "probability", ()),
            (spreads, "stddev", ("--uncertainty", 0.95)),
        ):
            out = folder / f"{column}.parquet"
            predict = "predict", folder / "run", "--input", asked.eval, "--out", out
            common.dpsgd(*predict, *more)
            found.append(pq.read_table(out)[column].to_numpy())
    for line in summary(np.stack(last), np.stack(spreads), asked.keep_last):
        print(line)


if __name__ == "__main__":
    main()
