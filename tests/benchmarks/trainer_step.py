"""Whole training steps, reading included, as ratios to a non-private Keras step.

    python tests/benchmarks/trainer_step.py [--buckets 1000] [--steps 30] [--json]

The model is the click model of arXiv:2411.04205 in two sizes; the batch is 1,024 rows.
``Keras`` is ``train_on_batch`` of the compiled model on the same batches; ``registry``
is TF Privacy's layer-registry path in our step.  Wall time is the median of the steps
and means something on an idle machine only; processor time is the mean over all threads
and changes less with what else runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]

import conftest  # noqa: E402

from pipelines.keys import insecure_key  # noqa: E402
from tests.trainer.zoo import registry_sum  # noqa: E402
from trainer import clipping  # noqa: E402
from trainer.batches import BatchSource  # noqa: E402
from trainer.dp_step import Step  # noqa: E402
from trainer.models import TrainableModel, criteo_model  # noqa: E402
from trainer.noise import NoiseStream  # noqa: E402
from trainer.tf_privacy import keras, tf  # noqa: E402

BATCH = 1024
#: Steps before the clock starts: compilation, and the first noise.
WARM_UP = 5

_SUMS: dict[str, Callable[[TrainableModel], Any]] = {
    "ours": lambda model: clipping.clipped_sum(model, l2_norm_clip=1.0),
    "registry": lambda model: registry_sum(model, 1.0),
}


def _make_batches(folder: pathlib.Path, num_steps: int, buckets: int) -> Any:
    rows = conftest.make_rows(4 * BATCH)
    rows["categories"] = np.random.default_rng(0).integers(0, buckets, (len(rows), 26))
    steps = [rows[(i % 4) * BATCH :][: BATCH - 20] for i in range(num_steps)]
    made = conftest.write_batches(
        folder, steps, expected_batch_size=BATCH - 20, truncated_batch_size=BATCH,
        physical_batch_size=BATCH, num_examples=100 * BATCH,
    )  # fmt: skip
    dataset = {"name": "criteo", "num_buckets": [buckets] * 26}
    # The files stay as they are: only the model reads the number of buckets.
    return made.path, made.manifest, dataclasses.replace(
        made.manifest, dataset=dataset
    )  # fmt: skip


def _seconds_per_step(step: Callable[[Any], None], source: Any) -> dict[str, float]:
    times, work = [], []
    iterator: Iterator[Any] = iter(source)
    while True:
        start, start_work = time.perf_counter(), time.process_time()
        batch = next(iterator, None)
        if batch is None:
            break
        step(batch)
        times.append(time.perf_counter() - start)
        work.append(time.process_time() - start_work)
    return {
        "wall": float(np.median(times[WARM_UP:])),
        "processor": float(np.mean(work[WARM_UP:])),
    }


def _model(manifest: Any, dim: int) -> TrainableModel:
    keras.utils.set_random_seed(0)
    network = criteo_model(manifest, embedding_dim=dim, hidden=(598,) * 4)
    return TrainableModel(network=network, description={})


def _keras_step(model: TrainableModel, optimizer: str) -> Callable[[Any], None]:
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.network.compile(optimizer, loss)

    def step(batch: Any) -> None:
        columns = batch["columns"]
        model.network.train_on_batch(
            model.inputs(columns), columns["label"], batch["weight"]
        )

    return step


def _private_step(
    model: TrainableModel, optimizer: str, gradient_sum: Any, noise: Iterator[Any]
) -> Callable[[Any], None]:
    private = Step(
        model.variables,
        gradient_sum,
        keras.optimizers.get(optimizer),
        expected_batch_size=BATCH,
    )

    def step(batch: Any) -> None:
        private.begin(next(noise))
        private.add(batch["columns"], batch["weight"])
        private.finish()
        # Keras waits for its loss; so do we for the last update.
        model.variables[-1].numpy()

    return step


def measure(buckets: int, dim: int, optimizer: str, num_steps: int) -> dict[str, Any]:
    """Returns seconds per step of each way of training, and their ratios."""
    tf.config.experimental.enable_op_determinism()
    with tempfile.TemporaryDirectory() as folder:
        path, manifest, sized = _make_batches(
            pathlib.Path(folder) / "batches", num_steps, buckets
        )
        model = _model(sized, dim)
        seconds = {
            "keras": _seconds_per_step(
                _keras_step(model, optimizer), BatchSource(path, manifest)
            )
        }
        for name, make in _SUMS.items():
            model = _model(sized, dim)
            with NoiseStream(
                insecure_key(0),
                steps=range(num_steps),
                shapes=[tuple(v.shape) for v in model.variables],
                noise_stddev=1.0,
            ) as noise:
                step = _private_step(model, optimizer, make(model), iter(noise))
                seconds[name] = _seconds_per_step(step, BatchSource(path, manifest))
    ours, registry = seconds["ours"], seconds["registry"]
    return {
        "parameters": sum(int(np.prod(v.shape)) for v in model.variables),
        "optimizer": optimizer,
        "seconds_per_step": seconds,
        "ours / keras": {k: ours[k] / seconds["keras"][k] for k in ours},
        "registry / ours": {k: registry[k] / ours[k] for k in ours},
    }


def main() -> None:
    """Prints one line for each model size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, nargs="+", default=[300])
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    for buckets in flags.buckets:
        found = measure(buckets, flags.embedding_dim, flags.optimizer, flags.steps)
        if flags.json:
            print(json.dumps(found))
            continue
        print(f"{found['parameters']:,} parameters, {found['optimizer']}")
        for kind in ("wall", "processor"):
            times = ", ".join(
                f"{name} {value[kind] * 1e3:.0f} ms"
                for name, value in found["seconds_per_step"].items()
            )
            print(
                f"  {kind} time: {times}; "
                f"ours / Keras {found['ours / keras'][kind]:.2f}, "
                f"registry / ours {found['registry / ours'][kind]:.2f}"
            )


if __name__ == "__main__":
    main()
