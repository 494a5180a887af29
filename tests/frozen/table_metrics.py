"""AUC, accuracy and log loss of ten tables by the defaults, over five seeds.

The answer of a metric is its mean and the standard deviation of one run.  Noise is
drawn anew by every run: means are compared within what five runs of each side may
differ.
"""

from __future__ import annotations

import math
import pathlib
import sys
import tempfile

import numpy as np
from scipy import stats

from examples.benchmarks import untuned
from tests.frozen.compare import Answers

NUM_SEEDS = 5
#: The two tables of 8 million rows take hours.
TABLES = [name for name in untuned.TABLES if "8 million" not in name]
#: Of a comparison of 20 metrics that have not changed: how often it finds a change.
_ERROR = 0.01
#: The largest difference of two means by chance, in its standard deviations.
_SPREADS = float(stats.t.isf(_ERROR / 20 / 2, df=2 * (NUM_SEEDS - 1)))


def answer(names: list[str] | None) -> Answers:
    """Trains on all tables, or on those of the metrics named."""
    wanted = {name.rsplit(", ", 1)[0] for name in names or ()}
    untuned.find_examples()
    found: Answers = {}
    with tempfile.TemporaryDirectory() as temporary:
        out = pathlib.Path(temporary)
        results = untuned.Results(out / "results.json")
        for name in TABLES:
            if names is not None and name not in wanted:
                continue
            print(f"{name} ...", file=sys.stderr, flush=True)
            folder = untuned.made(name, out)
            runs = untuned.runs_of_defaults(name, folder, results, NUM_SEEDS)
            for metric in untuned.metrics_of(name, runs[0]):
                values = [run[metric] for run in runs]
                spread = float(np.std(values, ddof=1))
                mean = round(float(np.mean(values)), 5)
                found[f"{name}, {metric}"] = [mean, round(spread, 5)]
    return found


def same(before: list[float], now: list[float]) -> bool:
    """Whether the means of five runs differ by no more than chance lets them.

    Args:
      before: Mean and standard deviation that were frozen.
      now: Those of this code.
    """
    of_means = math.hypot(before[1], now[1]) / math.sqrt(NUM_SEEDS)
    return abs(before[0] - now[0]) <= _SPREADS * of_means
