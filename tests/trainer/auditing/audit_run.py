"""Small runs of the trainer on a table of canaries, and the checks of their releases.

The table goes through the batch job and the trainer like any other: sampling, Beam job,
batch files, padding, clipping, noise, optimizer, checkpoints.  Every canary has its own
weights in several layers (see ``audit_model``), and is real or a ghost.  The releases
are tested in two ways:

  - Trials: the change of the weights along the gradient of a canary, times b over the
    learning rate and the clip norm, is 1 for each step of the canary, plus noise.  One
    trial per canary bounds epsilon without any assumption (Steinke, Nasr and Jagielski
    2023, arXiv:2305.08846).
  - Checks: without the contributions of the canaries in its batches, a release must be
    noise (see ``audit_release``).  Checks find small faults.

``RUNS`` has four kinds of runs: with dense and with lazy noise, with many canaries and
with so few that steps are empty.  One of them computes gradients one example at a time.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting import audits
from accounting.core.plan import DpSgdPlan
from pipelines.batches.folder import read_manifest
from pipelines.core.batches.manifest import Manifest
from pipelines.files import processes
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from tests.trainer.auditing import audit_model, audit_release
from tests.trainer.auditing.audit_model import CANARY, LAYERS, NUM_CANARIES, directions
from tests.trainer.auditing.residuals import Check
from trainer.core.step.grid import CLIPS
from trainer.settings.requests import Request
from trainer.settings.train_settings import DENSE_NOISE, LAZY_NOISE, TrainSettings
from trainer.train import train

CLIP, NOISE = 3.0, 1.0
#: Canaries, hence trials, of a run with many.
MANY = 4096
#: Of these a third of 32 steps is empty.
FEW = 32
#: Gradient norm of canaries, over the clip norm, and its minimum.
_SLOPE, _LEAST_SLOPE = 10.0, 1.0
#: Row groups of the table, so that the batch job has several blocks.
_NUM_BLOCKS = 3
#: Steps per release of a lazy run, in which rows wait for their noise.
_LAZY_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A run of one epoch of Poisson batches.

    Attributes:
      embedding_noise: Noise of the tables: "dense" or "lazy".
      num_canaries: Number of canaries.
      num_steps: Number of steps.
      physical_batch_size: Examples per physical batch.
      model: Function of ``audit_model``.
      l2_norm_clip: Clip norm, or "auto".
    """

    embedding_noise: str
    num_canaries: int
    num_steps: int
    physical_batch_size: int
    model: str = "weights"
    l2_norm_clip: float | str = CLIP

    @property
    def name(self) -> str:
        """Name of its kind."""
        return f"{self.embedding_noise}, {self.num_canaries}"

    @property
    def expected_batch_size(self) -> int:
        """Expected examples per step."""
        return self.num_canaries // self.num_steps

    @property
    def steps_per_release(self) -> int:
        """Steps per release: several with lazy noise, so that some is late."""
        return _LAZY_STEPS if self.embedding_noise == LAZY_NOISE else 1

    @property
    def is_real(self) -> np.ndarray:
        """Whether each canary is real: their order says nothing to the sampler."""
        return np.arange(self.num_canaries) % 2 == 0


DENSE, LAZY, DENSE_FEW, LAZY_FEW = RUNS = (
    # Half of the steps have one physical batch; below, none has.
    SmallRun(
        embedding_noise=DENSE_NOISE, num_canaries=MANY, num_steps=8,
        physical_batch_size=512,
    ),
    SmallRun(
        embedding_noise=LAZY_NOISE, num_canaries=MANY, num_steps=8,
        physical_batch_size=192,
    ),
    # One batch per step, except in one step of 10^14.
    SmallRun(
        embedding_noise=DENSE_NOISE, num_canaries=FEW, num_steps=FEW,
        physical_batch_size=16, model="unproven_weights",
    ),
    SmallRun(
        embedding_noise=LAZY_NOISE, num_canaries=FEW, num_steps=FEW,
        physical_batch_size=2,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one small run.

    Attributes:
      run: The small run.
      plan: Plan of its batches.
      real: Scores of real canaries, (canaries,).
      ghost: Scores of ghosts, (ghosts,).
      checks: Checks of its releases.
    """

    run: SmallRun
    plan: DpSgdPlan
    real: np.ndarray
    ghost: np.ndarray
    checks: list[Check]


def write_batches(folder: pathlib.Path, run: SmallRun) -> None:
    """Writes canaries, held-out rows and batches.

    Args:
      folder: Folder in which ``data``, ``held-out`` and ``batches`` are made.
      run: The small run.
    """

    def write(path: pathlib.Path, labels: np.ndarray) -> None:
        path.parent.mkdir()
        flat = pa.array(labels.astype(np.float32).ravel())
        lists = pa.FixedSizeListArray.from_arrays(flat, len(LAYERS))
        numbers = np.arange(1, len(labels) + 1, dtype=np.int32)
        table = pa.table({CANARY: numbers, "label": lists})
        described = json.dumps({NUM_CANARIES: run.num_canaries}).encode()
        table = table.replace_schema_metadata({DATASET_METADATA_KEY: described})
        pq.write_table(table, path, row_group_size=-(-len(labels) // _NUM_BLOCKS))

    # An automatic clip grows, for gradients that exceed it.
    largest = CLIPS[-1] if isinstance(run.l2_norm_clip, str) else run.l2_norm_clip
    slope = max(_SLOPE * float(largest), _LEAST_SLOPE)
    slopes = slope * directions(run.num_canaries) * run.is_real[:, None]
    write(folder / "data" / "rows.parquet", 1 + slopes)
    # A run needs held-out examples; their metrics are not used.
    write(folder / "held-out" / "rows.parquet", np.ones((2, len(LAYERS))))
    settings = BatchSettings(
        sampler="poisson",
        expected_batch_size=run.expected_batch_size,
        num_epochs=1,
        physical_batch_size=run.physical_batch_size,
    )
    folders = f"{folder}/data", f"{folder}/batches"
    processes.call(MAKE_BATCHES, *folders, settings)


def examine(folder: pathlib.Path, run: SmallRun, *, within: bool = True) -> Outcome:
    """Trains on the batches, and examines the releases; see `write_batches`."""
    manifest = read_manifest(folder / "batches")
    canaries = audit_release.Canaries(is_real=run.is_real)
    noise = NOISE * run.steps_per_release**0.5
    checks = audit_release.ReleaseChecks(
        canaries,
        audit_release.read_contents(folder / "batches"),
        noise=noise,
        steps_per_release=run.steps_per_release,
        looks_within=within,
    )
    found = []
    for change in changes(folder, run, manifest):
        checks.add(change)
        found.append(canaries.project(change))
    sums, every, plan = np.stack(found), run.steps_per_release, manifest.plan
    # A release of several steps is scored as one step of as many times the examples.
    seen = dataclasses.replace(
        plan,
        expected_batch_size=plan.expected_batch_size * every,
        num_steps=plan.num_steps // every,
    )
    positions = np.arange(sums.shape[1])
    trials = audits.Trials(
        plan=seen, noise_multiplier=noise, observe=sums.__getitem__, positions=positions
    )
    scores = audits.audit_of(seen.sampler, 1).score(trials)
    return Outcome(
        run=run,
        plan=plan,
        real=scores[run.is_real],
        ghost=scores[~run.is_real],
        checks=checks.results(),
    )


def changes(
    folder: pathlib.Path, run: SmallRun, manifest: Manifest
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the change of each layer's weights by every release, in clip norms.

    Args:
      folder: Folder of `write_batches`, in which the run is trained.
      run: The small run.
      manifest: The manifest of its batches.
    """
    # Of an automatic clip, updates are in units of it.
    clip = 1.0 if isinstance(run.l2_norm_clip, str) else run.l2_norm_clip
    scale = manifest.plan.expected_batch_size / clip
    model = getattr(audit_model, run.model)(manifest)
    layers = [audit_model.layer_of(variable) for variable in model.trainable_weights]
    before = dict.fromkeys(layers, np.float32(0))
    for path in _train(folder, run, manifest.plan.num_steps):
        with np.load(path) as found:
            after = {
                layer: found[f"weight_{index}"].ravel()
                for index, layer in enumerate(layers)
            }
        yield {layer: (after[layer] - before[layer]) * scale for layer in layers}
        before = after


def _train(folder: pathlib.Path, run: SmallRun, num_steps: int) -> list[pathlib.Path]:
    """Trains, and returns the files of the released weights, in order."""
    every = run.steps_per_release
    settings = TrainSettings(
        model=f"{audit_model.__name__}:{run.model}",
        loss=f"{audit_model.__name__}:linear",
        optimizer="sgd",
        learning_rate=1.0,
        noise_multiplier=NOISE,
        l2_norm_clip=run.l2_norm_clip,
        keep_last=num_steps // every,
        keep_every=every,
        # An evaluation completes lazy noise: none before a release.
        eval_every=num_steps,
        embedding_noise=run.embedding_noise,
    )
    train(
        Request(
            settings=settings,
            batches=folder / "batches",
            held_out=folder / "held-out",
            run=folder / "run",
        )
    )
    steps = range(every, num_steps + 1, every)
    return [folder / f"run/iterates/step-{step:08d}.npz" for step in steps]
