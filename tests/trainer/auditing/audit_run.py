"""One small run of the audit of a trainer: its canaries, batches, training and scores.

Public: everything, since nobody's data is in it; see ``audit_training``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import secrets
import tempfile
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.plan import DpSgdPlan
from pipelines.batches.folder import read_manifest
from pipelines.core.batches.manifest import Manifest
from pipelines.core.users.bounded import USERS
from pipelines.files import separate_process
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from pipelines.tables.bounding import BoundSettings
from tests.pipelines.bounded_rows import bound_rows
from tests.trainer.auditing import audit_model, audit_release
from tests.trainer.auditing.audit_model import CANARY, LAYERS, NUM_CANARIES, directions
from tests.trainer.auditing.audit_training import Outcome, SmallRun
from trainer import auditing
from trainer.core.step.adaptive_clip import CLIPS
from trainer.settings.requests import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

#: Gradient norm of canaries, over the clip norm, and its minimum.
_SLOPE = 10.0
_LEAST_SLOPE = 1.0
#: Row groups of the table, so that the batch job has several blocks.
_NUM_BLOCKS = 3
_USER = "user"


def carry_out(run: SmallRun) -> Outcome:
    """Makes batches, trains, scores every canary and checks the releases.

    Raises:
      InputError: the batch job or the training was refused.
    """
    coins = np.frombuffer(secrets.token_bytes(run.num_canaries // 8), np.uint8)
    is_real = np.unpackbits(coins).astype(bool)
    with tempfile.TemporaryDirectory(prefix="dpsgd-audit-") as name:
        folder = pathlib.Path(name)
        write_table(folder, run, is_real)
        if run.sampled is not None:
            bound_users(folder, run)
        make_batches(folder, run)
        return examine(folder, run, is_real)


def write_table(folder: pathlib.Path, run: SmallRun, is_real: np.ndarray) -> None:
    """Writes the canaries, and held-out rows.

    Args:
      folder: Folder in which ``data`` and ``held-out`` are made.
      run: The small run.
      is_real: Whether each canary is real or a ghost, (canaries,).
    """

    def write(path: pathlib.Path, labels: np.ndarray, user: np.ndarray) -> None:
        path.parent.mkdir()
        flat = pa.array(labels.astype(np.float32)[user].ravel())
        lists = pa.FixedSizeListArray.from_arrays(flat, len(LAYERS))
        table = pa.table({CANARY: _in_views(user + 1, run.views), "label": lists})
        if run.sampled is not None and path.parent.name == "data":
            table = table.append_column(_USER, pa.array(user))
        described = json.dumps({NUM_CANARIES: len(is_real)}).encode()
        table = table.replace_schema_metadata({DATASET_METADATA_KEY: described})
        pq.write_table(table, path, row_group_size=-(-len(user) // _NUM_BLOCKS))

    # An automatic clip grows, for gradients that exceed it.
    largest = CLIPS[-1] if isinstance(run.l2_norm_clip, str) else run.l2_norm_clip
    slope = max(_SLOPE * float(largest), _LEAST_SLOPE)
    slopes = slope * directions(len(is_real)) * is_real[:, None]
    write(folder / "data" / "rows.parquet", 1 + slopes, _users(run))
    # A run needs held-out examples; their metrics are not used.
    write(folder / "held-out" / "rows.parquet", np.ones((2, len(LAYERS))), np.arange(2))


def _in_views(canaries: np.ndarray, views: int) -> pa.Array:
    """Returns a column with the canary of each row, once per view."""
    each = pa.array(np.repeat(canaries, views).astype(np.int32))
    return each if views == 1 else pa.FixedSizeListArray.from_arrays(each, views)


def _users(run: SmallRun) -> np.ndarray:
    """Returns the user of each row; rows of one user are spread over the table."""
    users = np.arange(run.num_canaries)
    if run.sampled != USERS:
        return np.tile(users, run.raw_rows)
    # Records of all sizes, most of them full.
    rows = [users[users % run.raw_rows >= copy] for copy in range(run.raw_rows)]
    return np.concatenate(rows)


def bound_users(folder: pathlib.Path, run: SmallRun) -> None:
    """Bounds the rows of each user, into the folder ``bounded``; see `write_table`.

    Raises:
      InputError: the table was refused.
    """
    assert run.sampled is not None
    settings = BoundSettings(
        user_column=_USER,
        max_examples_per_user=run.rows_per_user,
        num_examples=run.num_examples,
        sampled=run.sampled,
    )
    rows = folder / "data" / "rows.parquet"
    size = -(-run.num_canaries // _NUM_BLOCKS)
    bound_rows(rows, folder / "bounded", settings, row_group_rows=size)


def make_batches(folder: pathlib.Path, run: SmallRun) -> None:
    """Makes the batches, in the folder ``batches``; see `write_table`.

    Raises:
      InputError: the job was refused, or its process failed.
    """
    settings = BatchSettings(
        sampler=run.sampler,
        expected_batch_size=run.expected_batch_size,
        num_epochs=run.num_epochs,
        physical_batch_size=run.physical_batch_size,
    )
    source = "data" if run.sampled is None else "bounded/train"
    folders = f"{folder}/{source}", f"{folder}/batches"
    separate_process.call(MAKE_BATCHES, *folders, settings)


def examine(folder: pathlib.Path, run: SmallRun, is_real: np.ndarray) -> Outcome:
    """Trains on the batches, and examines the releases; see `write_table`."""
    manifest = read_manifest(folder / "batches")
    canaries = audit_release.Canaries(is_real=is_real)
    checks = audit_release.ReleaseChecks(
        canaries,
        audit_release.read_contents(folder / "batches"),
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
    """Yields the change of each layer's weights by every release, in clip norms."""
    # Of an automatic clip, updates are in units of it.
    clip = 1.0 if isinstance(run.l2_norm_clip, str) else run.l2_norm_clip
    scale = manifest.plan.expected_batch_size / clip
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
        # An evaluation completes lazy noise: none before a release.
        eval_every=num_steps,
        embedding_noise=run.embedding_noise,
        views=run.views,
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
    """Returns the score of every canary from sums of shape (releases, canaries)."""
    every, cap = run.steps_per_release, plan.truncated_batch_size
    # A release of several steps is scored as one step of as many times the examples.
    # Any score is valid; this is the best, except for samplers that take an example
    # twice.
    seen = dataclasses.replace(
        plan,
        expected_batch_size=plan.expected_batch_size * every,
        num_steps=plan.num_steps // every,
        truncated_batch_size=cap and min(cap * every, plan.num_examples),
    )
    return auditing.score(
        seen,
        run.noise_multiplier * every**0.5,
        sums.__getitem__,
        positions=np.arange(sums.shape[1]),
        canary_rows=run.canary_rows,
    )
