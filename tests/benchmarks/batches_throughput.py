"""The batch job beside a per-example Beam job and beside the limit, in one run.

    python -m tests.benchmarks.batches_throughput [--rows N] [--scale M]

Prints, for Criteo-shaped rows and b = 1024, one epoch, on the local runner:

- per-example: a faithful formulation of the paper's sketch: one element per example,
  which draws its steps; GroupByKey by step; one tf.train.Example per row (on 1/20 of
  the rows, because it is that slow);
- limit: reading the same Parquet and writing as many bytes as the batches have, with no
  sampling at all;
- this project's job, at N and at M rows: linear if the rates agree;
- reading the batches, beside a reader of one tf.train.Example per row.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator

import apache_beam as beam
import numpy as np
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from accounting.core.accountant import smallest_truncated_batch_size
from accounting.core.plan import TRUNCATED_POISSON, DpSgdPlan, steps_per_epoch
from pipelines.inputs.parquet_blocks import list_blocks, read_block
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import estimate, make_layout
from tests.benchmarks.prepared_rows import write_rows

BATCH_SIZE = 1024


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def make_plan(num_rows: int) -> DpSgdPlan:
    """One epoch of truncated Poisson batches."""
    steps = steps_per_epoch(num_rows, BATCH_SIZE)
    cap = smallest_truncated_batch_size(
        num_examples=num_rows, expected_batch_size=BATCH_SIZE, num_steps=steps,
        epsilon=8, delta=0.1 / num_rows,
    )  # fmt: skip
    return DpSgdPlan(
        sampler=TRUNCATED_POISSON, num_examples=num_rows, num_steps=steps,
        expected_batch_size=BATCH_SIZE, truncated_batch_size=cap,
    )  # fmt: skip


def run_columnar(source: pathlib.Path, out: pathlib.Path, num_rows: int) -> float:
    """Seconds of this project's job."""
    dataset = list_blocks(str(source))
    layout = make_layout(make_plan(num_rows), dataset)
    return timed(lambda: write_batches(dataset=dataset, layout=layout, out=out))


class _SampleRow(beam.DoFn):
    """row -> (step, row) for every step that it chooses."""

    def __init__(self, plan: DpSgdPlan) -> None:
        self._steps = plan.num_steps
        self._probability = float(plan.sampling_probability)

    def process(self, row: dict) -> Iterator[tuple[int, dict]]:
        count = np.random.binomial(self._steps, self._probability)
        for step in random.sample(range(self._steps), count):
            yield step, row


class _ToExamples(beam.DoFn):
    """(step, rows) -> tf.train.Examples, truncated and padded with weight 0."""

    def __init__(self, cap: int) -> None:
        self._cap = cap

    def process(self, step_and_rows: tuple[int, object]) -> Iterator[bytes]:
        import tensorflow as tf

        def example(row: dict, weight: float) -> bytes:
            def ints(values: list) -> tf.train.Feature:
                return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

            def floats(values: list) -> tf.train.Feature:
                return tf.train.Feature(float_list=tf.train.FloatList(value=values))

            feature = {
                "step": ints([step]),
                "label": ints([row["label"]]),
                "integers": floats(row["integers"]),
                "categories": ints(row["categories"]),
                "weight": floats([weight]),
            }
            features = tf.train.Features(feature=feature)
            return tf.train.Example(features=features).SerializeToString()

        step, rows = step_and_rows
        kept = list(rows)
        random.shuffle(kept)
        kept = kept[: self._cap]
        empty = {"label": 0, "integers": [0.0] * 13, "categories": [0] * 26}
        yield from (example(row, 1.0) for row in kept)
        yield from (example(empty, 0.0) for _ in range(self._cap - len(kept)))


def run_per_example(source: pathlib.Path, out: pathlib.Path, num_rows: int) -> float:
    """Seconds of the same job with one element per example."""
    plan = make_plan(num_rows)

    def work() -> None:
        with beam.Pipeline(FnApiRunner()) as pipeline:
            _ = (
                pipeline
                | beam.io.ReadFromParquet(str(source / "*.parquet"))
                | beam.ParDo(_SampleRow(plan))
                | beam.GroupByKey()
                | beam.ParDo(_ToExamples(plan.truncated_batch_size or 0))
                | beam.io.WriteToTFRecord(str(out / "examples"), num_shards=4)
            )

    out.mkdir()
    return timed(work)


def run_limit(source: pathlib.Path, out: pathlib.Path, num_rows: int) -> float:
    """Seconds to read the input, and to write as many bytes as the batches have."""
    dataset = list_blocks(str(source))
    layout = make_layout(make_plan(num_rows), dataset)
    total = estimate(layout).output_bytes
    piece = np.random.default_rng(0).bytes(8 << 20)

    def work() -> None:
        for block in dataset.blocks:
            read_block(block, dataset.columns, dataset.is_listed)
        with open(out, "wb") as file:
            for _ in range(total // len(piece)):
                file.write(piece)

    return timed(work)


def read_rates(batches: pathlib.Path, examples: pathlib.Path) -> tuple[float, float]:
    """Rows per second into tensors: of the batches, and of one Example per row."""
    import tensorflow as tf

    from pipelines.batches.folder import read_manifest
    from trainer.core.run.batches import BatchSource

    manifest = read_manifest(batches)
    source = BatchSource(batches, manifest)
    count = 0

    def read_ours() -> None:
        nonlocal count
        for _ in source:
            count += manifest.physical_batch_size

    ours = timed(read_ours)
    spec = {
        "label": tf.io.FixedLenFeature([], tf.int64),
        "integers": tf.io.FixedLenFeature([13], tf.float32),
        "categories": tf.io.FixedLenFeature([26], tf.int64),
        "weight": tf.io.FixedLenFeature([], tf.float32),
    }
    files = [str(path) for path in examples.glob("examples*")]
    dataset = tf.data.TFRecordDataset(files).map(
        lambda record: tf.io.parse_single_example(record, spec),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    rows = 0

    def read_theirs() -> None:
        nonlocal rows
        for batch in dataset.batch(manifest.physical_batch_size).prefetch(2):
            rows += len(batch["weight"])

    theirs = timed(read_theirs)
    return count / ours, rows / theirs


def main() -> None:
    """Runs everything and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--scale", type=int, default=16_000_000)
    arguments = parser.parse_args()
    rows, scale, few = arguments.rows, arguments.scale, arguments.rows // 20
    with tempfile.TemporaryDirectory(dir=".") as folder:
        root = pathlib.Path(folder)
        for name, count in (("rows", rows), ("few", few), ("scale", scale)):
            write_rows(root / name, count)
        per_example = few / run_per_example(root / "few", root / "examples", few)
        print(f"per-example job:          {per_example:12,.0f} rows/s", flush=True)
        for count, name in ((rows, "rows"), (scale, "scale")):
            limit = count / run_limit(root / name, root / "limit", count)
            rate = count / run_columnar(root / name, root / f"out-{name}", count)
            print(
                f"this job, {count:11,} rows: {rate:12,.0f} rows/s = "
                f"{rate / per_example:.1f} x per-example; limit {limit:,.0f} rows/s = "
                f"{limit / rate:.2f} x this job",
                flush=True,
            )
        ours, theirs = read_rates(root / "out-rows", root / "examples")
        print(
            f"reading batches:          {ours:12,.0f} rows/s = {ours / theirs:.1f} x "
            f"one Example per row ({theirs:,.0f} rows/s)"
        )


if __name__ == "__main__":
    main()
