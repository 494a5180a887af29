"""One small run of the audit of a trainer: its canaries, batches, training and scores.

Public: everything, since nobody's data is in it; see ``audit_training``.
"""

from __future__ import annotations

import dataclasses
import pathlib
import secrets
import tempfile
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.plan import DpSgdPlan
from pipelines.batches.manifest import Manifest, read_manifest
from pipelines.files import separate_process
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from trainer.auditing import audit_mechanism, audit_model, audit_release
from trainer.auditing.audit_model import CANARY, LAYERS, directions
from trainer.auditing.audit_training import Outcome, SmallRun
from trainer.settings.request import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

#: Gradient norms of canaries, over the clip norm; and at least.
_SLOPE = 10.0
_LEAST_SLOPE = 1.0
#: Row groups of the table, so that the batch job has several blocks.
_NUM_BLOCKS = 3


def carry_out(run: SmallRun) -> Outcome:
    """Makes batches, trains, scores every canary and checks what was released.

    Raises:
      InputError: the batch job or the training was refused.
    """
    coins = np.frombuffer(secrets.token_bytes(run.num_canaries // 8), np.uint8)
    is_real = np.unpackbits(coins).astype(bool)
    with tempfile.TemporaryDirectory(prefix="dpsgd-audit-") as name:
        folder = pathlib.Path(name)
        write_table(folder, run, is_real)
        make_batches(folder, run)
        return examine(folder, run, is_real)


def write_table(folder: pathlib.Path, run: SmallRun, is_real: np.ndarray) -> None:
    """Writes the canaries, and rows to evaluate by.

    Args:
      folder: Gets folders ``data`` and ``held-out``.
      run: Whose data it is.
      is_real: Of each canary, whether it is real or a ghost.
    """

    def write(path: pathlib.Path, labels: np.ndarray) -> None:
        path.parent.mkdir()
        flat = pa.array(labels.astype(np.float32).ravel())
        numbers = np.arange(1, len(labels) + 1, dtype=np.int32)
        lists = pa.FixedSizeListArray.from_arrays(flat, len(LAYERS))
        table = pa.table({CANARY: numbers, "label": lists})
        pq.write_table(table, path, row_group_size=-(-len(labels) // _NUM_BLOCKS))

    slope = max(_SLOPE * run.l2_norm_clip, _LEAST_SLOPE)
    slopes = slope * directions(len(is_real)) * is_real[:, None]
    write(folder / "data" / "part.parquet", 1 + slopes)
    # Held-out examples must be there; what they score says nothing here.
    write(folder / "held-out" / "part.parquet", np.ones((2, len(LAYERS))))


def make_batches(folder: pathlib.Path, run: SmallRun) -> None:
    """Makes the batches of the canaries in ``folder``.

    Args:
      folder: From ``write_table``; gets a folder ``batches``.
      run: Whose batches they are.

    Raises:
      InputError: the job was refused, or its process failed.
    """
    settings = BatchSettings(
        sampler=run.sampler,
        expected_batch_size=run.expected_batch_size,
        num_epochs=run.num_epochs,
        physical_batch_size=run.physical_batch_size,
    )
    folders = f"{folder}/data", f"{folder}/batches"
    separate_process.call(MAKE_BATCHES, *folders, settings)


def examine(folder: pathlib.Path, run: SmallRun, is_real: np.ndarray) -> Outcome:
    """Trains on the batches in ``folder``, and looks at what is released.

    Args:
      folder: From ``write_table`` and ``make_batches``.
      run: What to train.
      is_real: Of each canary, whether it is real or a ghost.
    """
    manifest = read_manifest(folder / "batches")
    canaries = audit_release.Canaries(is_real=is_real)
    checks = audit_release.ReleaseChecks(
        canaries,
        audit_release.read_parts(folder / "batches"),
        noise=run.noise_multiplier * run.steps_per_release**0.5,
        steps_per_release=run.steps_per_release,
    )
    sums = []
    for change in _changes(folder, run, manifest):
        checks.add(change)
        sums.append(canaries.project(change))
    scores = _score(np.stack(sums), run, manifest.plan)
    real, ghost = is_real & run.has_trials, ~is_real & run.has_trials
    return Outcome(
        run=run,
        plan=manifest.plan,
        real=scores[real],
        ghost=scores[ghost],
        checks=checks.results(),
    )


def _changes(
    folder: pathlib.Path, run: SmallRun, manifest: Manifest
) -> Iterator[dict[str, np.ndarray]]:
    """Yields what every release adds to each layer's weights, in clip norms."""
    scale = manifest.plan.expected_batch_size / run.l2_norm_clip
    model = getattr(audit_model, run.model)(manifest)
    layers = [audit_model.layer_of(variable) for variable in model.trainable_weights]
    before = dict.fromkeys(layers, np.float32(0))
    for path in _train(folder, run, manifest):
        with np.load(path) as found:
            after = {
                layer: found[f"weight_{index}"].ravel()
                for index, layer in enumerate(layers)
            }
        yield {layer: (after[layer] - before[layer]) * scale for layer in layers}
        before = after


def _train(
    folder: pathlib.Path, run: SmallRun, manifest: Manifest
) -> list[pathlib.Path]:
    """Trains, and returns the files of the released weights, in order."""
    num_steps, every = manifest.plan.num_steps, run.steps_per_release
    settings = TrainSettings(
        model=f"{audit_model.__name__}:{run.model}",
        loss=f"{audit_model.__name__}:linear",
        optimizer="sgd",
        learning_rate=1.0,
        noise_multiplier=run.noise_multiplier,
        l2_norm_clip=run.l2_norm_clip,
        keep_last=num_steps // every,
        keep_every=every,
        # Lazy noise is completed for an evaluation: not before a release.
        eval_every=num_steps,
        embedding_noise=run.embedding_noise,
    )
    request = Request(
        settings=settings,
        batches=folder / "batches",
        held_out=folder / "held-out",
        run=folder / "run",
    )
    train(request)
    steps = range(every, num_steps + 1, every)
    return [folder / f"run/iterates/step-{step:08d}.npz" for step in steps]


def _score(sums: np.ndarray, run: SmallRun, plan: DpSgdPlan) -> np.ndarray:
    """Returns the score of every canary.

    Args:
      sums: What each release adds along its gradient, shape (releases, canaries).
      run: That released them.
      plan: Of its batches.
    """
    every, cap = run.steps_per_release, plan.truncated_batch_size
    # Releases of several steps are scored as steps of as many times the examples.  Any
    # score is valid; this is the best, except for samplers that take an example twice.
    seen = dataclasses.replace(
        plan,
        expected_batch_size=plan.expected_batch_size * every,
        num_steps=plan.num_steps // every,
        truncated_batch_size=cap and min(cap * every, plan.num_examples),
    )
    return audit_mechanism.score(
        seen,
        run.noise_multiplier * every**0.5,
        sums.__getitem__,
        positions=np.arange(sums.shape[1]),
    )
