"""Whole training steps, reading included, as ratios to a non-private Keras step.

    python tests/benchmarks/trainer_step.py [--buckets 300 185600] [--rounds 3]

The model is the click model of arXiv:2411.04205, four layers of 598 over 26 embeddings
and 13 integers, in two sizes; the batch is 1,024 rows; the optimizer is plain SGD.

    Keras      ``train_on_batch`` of the compiled model on the same batches, no privacy
    DP-SGD     what `dpsgd train` does: noise of large tables is lazy, and its flushes
               are counted with the steps between them
    BAM        the same, with bias-aware minimisation
    8 bands    DP-SGD with banded noise, of the small model alone: it keeps the noise of
               seven steps

Each way trains some steps in every round, one way after the other, so that what else
runs meets them all.  A ratio is the median of those of the rounds.  Wall time means
something on an idle machine; processor time is the sum over all threads and changes
less with what else runs.
"""

from __future__ import annotations

import argparse
import contextlib
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

from accounting.core.plan import TRUNCATED_CYCLIC_POISSON, DpSgdPlan  # noqa: E402
from pipelines.batches.folder import stored  # noqa: E402
from pipelines.files.key_sources import insecure_key  # noqa: E402
from tests.criteo import described  # noqa: E402
from trainer.claims import bam, lazy_noise  # noqa: E402
from trainer.claims.lazy_noise import LazyNoise  # noqa: E402
from trainer.core.run.session import read_elements  # noqa: E402
from trainer.core.step.bounded_sum import BoundedSum  # noqa: E402
from trainer.core.step.clipping import ExampleGradients  # noqa: E402
from trainer.core.step.dp_step import Step  # noqa: E402
from trainer.core.tf_compat import keras, tf  # noqa: E402
from trainer.gradients import paths  # noqa: E402
from trainer.model.table_model import read_table, table_model  # noqa: E402
from trainer.model.trainable_model import TrainableModel  # noqa: E402
from trainer.settings.train_settings import TrainSettings  # noqa: E402

BATCH = 1024
KEY = insecure_key(0)
#: Steps of a round before the clock starts: compilation, and noise drawn ahead.
WARM_UP = 5

Seconds = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Batches on disk, and the size of the model that trains on them."""

    path: pathlib.Path
    manifest: Any
    num_buckets: int
    dim: int
    num_steps: int

    def model(self) -> TrainableModel:
        # The files stay as they are: only the model reads the number of buckets.
        dataset = described(self.num_buckets)
        sized = dataclasses.replace(self.manifest, dataset=dataset)
        keras.utils.set_random_seed(0)
        table = read_table(sized)
        network = table_model(table, embedding_dim=self.dim, hidden=(598,) * 4)
        return TrainableModel(network=network, description={})


def make_setting(folder: pathlib.Path, buckets: int, dim: int, steps: int) -> Setting:
    """Writes the batches of one round."""
    rows = conftest.make_rows(4 * BATCH)
    rows["categories"] = np.random.default_rng(0).integers(0, buckets, (len(rows), 26))
    num_steps = WARM_UP + steps
    made = conftest.write_batches(
        folder, [rows[(i % 4) * BATCH :][: BATCH - 20] for i in range(num_steps)],
        expected_batch_size=BATCH - 20, truncated_batch_size=BATCH,
        physical_batch_size=BATCH, num_examples=100 * BATCH,
    )  # fmt: skip
    return Setting(made.path, made.manifest, buckets, dim, num_steps)


class Keras:
    """Training without privacy, as a Keras user writes it."""

    def __init__(self, setting: Setting) -> None:
        self.extra: Seconds = {"wall": 0.0, "processor": 0.0}
        self._model = setting.model()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self._model.network.compile("sgd", loss)

    @contextlib.contextmanager
    def steps(self) -> Iterator[Callable[[Any], None]]:
        """Gives the function that trains on one batch."""

        def step(batch: Any) -> None:
            columns = batch["columns"]
            self._model.network.train_on_batch(
                self._model.inputs(columns), columns["label"], batch["weight"]
            )

        yield step


class Private:
    """Training with our step.

    Args:
      setting: The batches and the model.
      make_gradients: Model -> gradients of single examples.
      plan: What the noise follows; by default that of the batches.
    """

    def __init__(
        self,
        setting: Setting,
        make_gradients: Callable[[TrainableModel], ExampleGradients],
        plan: DpSgdPlan | None = None,
    ) -> None:
        self._num_steps = setting.num_steps
        self._model, optimizer = setting.model(), keras.optimizers.SGD()
        chosen = lazy_noise.choose(
            self._model, optimizer,
            TrainSettings(
                noise_multiplier=1.0, l2_norm_clip=1.0, optimizer="sgd"
            ),
            manifest=setting.manifest,
        )  # fmt: skip
        summed = BoundedSum(
            make_gradients(self._model), plan or setting.manifest.plan,
            l2_norm_clip=1.0, noise_multiplier=1.0,
        )  # fmt: skip
        self._lazy, self._flush_every = None, 0
        if chosen is not None:
            reads, self._flush_every = chosen
            self._lazy = LazyNoise(reads, bounded=summed)
        self._step = Step(self._model.variables, summed, optimizer, lazy=self._lazy)
        self.extra: Seconds = {"wall": 0.0, "processor": 0.0}

    @contextlib.contextmanager
    def steps(self) -> Iterator[Callable[[Any], None]]:
        """Gives the function that trains on one batch; then flushes."""
        with self._step.noise(KEY, range(self._num_steps)) as noise:
            draws = iter(noise)

            def step(batch: Any) -> None:
                later = self._step.later_noise(KEY, int(batch["step"]))
                self._step.begin(next(draws), later)
                self._step.add(batch["columns"], batch["weight"])
                self._step.finish()
                # Keras waits for its loss; so do we for the last update.
                self._model.variables[-1].numpy()

            yield step
        if self._lazy is not None:
            later = self._step.later_noise(KEY, 0)
            spent = _clocked(lambda: self._lazy.flush(later.of_flush))
            self.extra = {k: v / self._flush_every for k, v in spent.items()}


def _banded(setting: Setting) -> Private:
    plan = dataclasses.replace(
        setting.manifest.plan, sampler=TRUNCATED_CYCLIC_POISSON, bands=8
    )
    return Private(setting, paths.example_gradients, plan)


def _bam(model: TrainableModel) -> ExampleGradients:
    return bam.bam_gradients(model, radius=0.02)


#: Name of a way to train -> what makes it.
WAYS: dict[str, Callable[[Setting], Any]] = {
    "Keras": Keras,
    "DP-SGD": lambda setting: Private(setting, paths.example_gradients),
    "BAM": lambda setting: Private(setting, _bam),
    "8 bands": _banded,
}
#: Buckets of a model whose banded noise fits beside the others' memory.
_FEW_BUCKETS = 10_000

#: (way, way it is divided by).
RATIOS = (("DP-SGD", "Keras"), ("BAM", "Keras"), ("8 bands", "DP-SGD"))


def _clocked(act: Callable[[], object]) -> Seconds:
    start, start_work = time.perf_counter(), time.process_time()
    act()
    return {
        "wall": time.perf_counter() - start,
        "processor": time.process_time() - start_work,
    }


def _seconds_per_step(way: Any, setting: Setting) -> Seconds:
    """Means over the steps of one round, reading included."""
    with way.steps() as step:
        batches = read_elements(stored(setting.path), setting.manifest)
        for _ in range(WARM_UP):
            step(next(batches))

        def rest() -> None:
            for batch in batches:
                step(batch)

        total = _clocked(rest)
    count = setting.num_steps - WARM_UP
    return {kind: total[kind] / count + way.extra[kind] for kind in total}


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """Returns seconds per step of each way, and the medians of their ratios."""
    few = setting.num_buckets < _FEW_BUCKETS
    made = {name: way for name, way in WAYS.items() if few or name != "8 bands"}
    ways = {name: make(setting) for name, make in made.items()}
    found = [
        {name: _seconds_per_step(way, setting) for name, way in ways.items()}
        for _ in range(rounds)
    ]
    kinds = ("wall", "processor")
    return {
        "parameters": sum(int(np.prod(v.shape)) for v in setting.model().variables),
        "seconds_per_step": {
            name: {k: float(np.median([f[name][k] for f in found])) for k in kinds}
            for name in ways
        },
        "ratios": {
            f"{a} / {b}": {
                k: float(np.median([f[a][k] / f[b][k] for f in found])) for k in kinds
            }
            for a, b in RATIOS
            if a in ways
        },
    }


def print_table(found: dict[str, Any]) -> None:
    """Prints one size as a table for people."""
    print(f"\n{found['parameters']:,} parameters {'wall':>14} {'processor':>12}")
    for name, times in found["seconds_per_step"].items():
        row = "".join(f"{times[k] * 1e3:10.0f} ms" for k in ("wall", "processor"))
        print(f"  {name:20}{row}")
    for name, ratio in found["ratios"].items():
        row = "".join(f"{ratio[k]:13.2f}" for k in ("wall", "processor"))
        print(f"  {name:20}{row}")


def main() -> None:
    """Prints one table for each model size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, nargs="+", default=[300, 185_600])
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    tf.config.experimental.enable_op_determinism()
    for buckets in flags.buckets:
        with tempfile.TemporaryDirectory() as folder:
            setting = make_setting(
                pathlib.Path(folder) / "batches", buckets, flags.embedding_dim,
                flags.steps,
            )  # fmt: skip
            found = measure(setting, flags.rounds)
        if flags.json:
            print(json.dumps(found))
        else:
            print_table(found)


if __name__ == "__main__":
    main()
