"""Compares last weights with averages on a stream that shifts periodically.

    python examples/papers/shift.py --input data/train --eval data/test --out shift \
        --batch-size 64 --period 40 --shift-by label --metric log_loss \
        -- --noise-multiplier 0.5 --l2-norm-clip 1

Section 4 of arXiv:2210.01864: rows are put in an order in which small and large values
of a column alternate like day and night; a run takes them once, in that order; last
weights and averages are evaluated along the way.  NOT PRIVATE: the order depends on all
rows.  What follows ``--`` goes to ``dpsgd train``.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import common
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq


def shares(num_steps: int, period: int) -> np.ndarray:
    """Returns the share of rows with large values in each step.

    Args:
      num_steps: Number of steps.
      period: Period in steps.
    """
    times = (np.arange(num_steps) + 0.5) / period
    return (1 - np.cos(2 * np.pi * times)) / 2


def order(values: np.ndarray, batch_size: int, period: int) -> np.ndarray:
    """Returns the indices of rows in their order in time, of whole periods.

    Args:
      values: Values that split the rows in halves; missing ones are small.
      batch_size: Rows of a step.
      period: Period in steps.
    """
    num_steps = len(values) // (batch_size * period) * period
    random = np.random.default_rng(0)
    ranked = np.argsort(np.nan_to_num(values, nan=-np.inf), kind="stable")
    small, large = (
        random.permutation(half) for half in np.split(ranked, [(len(ranked) + 1) // 2])
    )
    # The cumulative sum is rounded, so that rounding errors do not add up.
    total = np.floor(np.cumsum(shares(num_steps, period)) * batch_size + 1e-6)
    num_large = np.diff(total, prepend=0).astype(int)
    is_large = np.concatenate([np.arange(batch_size) < one for one in num_large])
    found = np.empty(len(is_large), np.int64)
    found[is_large] = large[: is_large.sum()]
    found[~is_large] = small[: (~is_large).sum()]
    return found


def main() -> None:
    """Orders the rows, trains, and prints and draws the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--period", type=int, required=True)
    parser.add_argument("--shift-by", required=True, help="A column of numbers.")
    parser.add_argument("--metric", default="auc")
    asked, of_train = common.parsed(parser)
    table = ds.dataset(asked.input, format="parquet").to_table()
    values = table[asked.shift_by].to_numpy().astype(float)
    rows = order(values, asked.batch_size, asked.period)
    (asked.out / "data").mkdir(parents=True)
    pq.write_table(table.take(pa.array(rows)), asked.out / "data" / "rows.parquet")
    batches = ["--input", asked.out / "data", "--batch-size", asked.batch_size]
    train = ["--eval", asked.eval, "--evaluate-averages", "--tail", asked.period]
    train += ["--ema-decay", 1 - 2 / (asked.period + 1)]
    train += ["--eval-every", max(1, asked.period // 8), *of_train]
    common.make_run(
        asked.out,
        [*batches, "--sampler", "deterministic", "--epochs", 1],
        train,
    )
    points = json.loads((asked.out / "run" / "curve.json").read_text())["points"]
    steps = np.array([point["step"] for point in points])
    _, axes = common.new_axes()
    for name in ("last", *points[0]["aggregates"]):
        of_name = [p if name == "last" else p["aggregates"][name] for p in points]
        curve = np.array([one[asked.metric] or np.nan for one in of_name], float)
        late = curve[steps > steps[-1] - asked.period]
        swing = late.max() - late.min()
        print(f"{name}: {late.mean():.4f} in the last period, swing {swing:.4f}")
        axes.plot(steps, curve, label=name)
    axes.fill_between(
        range(len(rows) // asked.batch_size),
        shares(len(rows) // asked.batch_size, asked.period),
        color="gray",
        alpha=0.2,
        label=f"share of large {asked.shift_by}",
    )
    axes.set(xlabel="step", ylabel=asked.metric)
    axes.legend()
    axes.figure.savefig(asked.out / "shift.png")


if __name__ == "__main__":
    main()
