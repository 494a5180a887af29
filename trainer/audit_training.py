"""The whole trainer under audit: real batches, a real run, and what it releases.

A table of canaries goes through ``dpsgd batches`` and ``dpsgd train``, as a user's rows
do: sampling, Beam job, batch files, padding, clipping, noise, optimizer, checkpoints.
Every canary has a weight of its own (see ``audit_model``); a fair coin decides whether
it is real or a ghost.  What a step adds to its weight, times b over the learning rate
and the clip norm, is 1 where the canary took part, plus noise: one trial per canary in
every run, scored as in ``audit_mechanism``.

The run is a small one: its sampler, noise multiplier and clip norm are those asked for,
its examples and steps are few.  What is found is held against the accountant's claim
for the small run.  It finds gross faults anywhere on the way: no or too little noise,
no clipping, examples in too many steps, steps that are released twice.

Formal guarantees:
  - The only inputs are the iterates that the run released, and its manifest.
  - The labels are fair coin flips from the operating system; every run has new keys.
  - The trials of one run are independent as far as the sampler's rows and the noise's
    values are, which their modules guarantee and their tests check.  Under shuffles, of
    fixed batch sizes, and under truncation rows are nearly so.

Public: everything, since nobody's data is in it.

References:
  Steinke, Nasr and Jagielski (2023), arXiv:2305.08846, for many canaries in one run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import secrets
import subprocess
import sys
import tempfile

import numpy as np

from accounting import truncated_poisson
from accounting.plan import DpSgdPlan
from accounting.validation import InputError
from pipelines.manifest import Manifest, read_manifest
from trainer import audit_mechanism
from trainer.settings import DENSE_NOISE

#: Canaries of a run: trials.
NUM_CANARIES = 4096
_MOST_STEPS = 32
_MOST_EPOCHS = 2
#: Gradient norms of canaries, over the clip norm.
_SLOPE = 10.0
#: Row groups of the table, so that the batch job has several blocks.
_NUM_BLOCKS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A run that is small enough to be carried out, and like the audited one.

    Attributes:
      sampler: Of the audited plan.
      steps_per_epoch: At most that of the audited plan.
      num_epochs: At most that of the audited plan.
      noise_multiplier: Of the audited run.
      l2_norm_clip: Of the audited run.
      embedding_noise: How the table of weights gets its noise: "dense" or "lazy".
    """

    sampler: str
    steps_per_epoch: int
    num_epochs: int
    noise_multiplier: float
    l2_norm_clip: float
    embedding_noise: str = DENSE_NOISE

    @property
    def expected_batch_size(self) -> int:
        """Examples of a step: those of an epoch are spread over its steps."""
        return NUM_CANARIES // self.steps_per_epoch


def small_run(
    plan: DpSgdPlan, noise_multiplier: float, l2_norm_clip: float
) -> SmallRun:
    """Returns the small run for an audited plan."""
    return SmallRun(
        sampler=plan.sampler,
        # A power of two divides the canaries.
        steps_per_epoch=1 << (min(plan.steps_per_epoch, _MOST_STEPS).bit_length() - 1),
        num_epochs=min(plan.num_epochs, _MOST_EPOCHS),
        noise_multiplier=noise_multiplier,
        l2_norm_clip=l2_norm_clip,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """What one small run gives.

    Attributes:
      plan: Of its batches.
      real: Scores of real canaries.
      ghost: Scores of ghosts.
    """

    plan: DpSgdPlan
    real: np.ndarray
    ghost: np.ndarray

    @property
    def slack(self) -> float:
        """Probability that a step is truncated, which would tie rows together."""
        return truncated_poisson.any_truncation_probability(self.plan)


def carry_out(run: SmallRun) -> Trials:
    """Makes batches, trains, and scores every canary.

    Raises:
      InputError: a command failed.
    """
    with tempfile.TemporaryDirectory(prefix="dpsgd-audit-") as name:
        folder = pathlib.Path(name)
        is_real = np.unpackbits(
            np.frombuffer(secrets.token_bytes(NUM_CANARIES // 8), np.uint8)
        ).astype(bool)
        _write_table(folder, is_real * _SLOPE * run.l2_norm_clip)
        _make_batches(folder, run)
        manifest = read_manifest(folder / "batches")
        iterates = _train(folder, run, manifest)
        scores = _score(iterates, run, manifest.plan)
    return Trials(plan=manifest.plan, real=scores[is_real], ghost=scores[~is_real])


def _write_table(folder: pathlib.Path, labels: np.ndarray) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainer.audit_model import CANARY

    def write(path: pathlib.Path, values: np.ndarray) -> None:
        path.parent.mkdir()
        ids = np.arange(len(values), dtype=np.int32)
        table = pa.table({CANARY: ids, "label": values.astype(np.float32)})
        pq.write_table(table, path, row_group_size=-(-len(values) // _NUM_BLOCKS))

    write(folder / "data" / "part.parquet", labels)
    # Held-out examples must be there; what they score says nothing here.
    write(folder / "held-out" / "part.parquet", np.zeros(2))


def _make_batches(folder: pathlib.Path, run: SmallRun) -> None:
    size = run.expected_batch_size
    command = [
        sys.executable, "-m", "dpsgd", "batches", f"--input={folder}/data",
        f"--out={folder}/batches", f"--sampler={run.sampler}", f"--batch-size={size}",
        f"--epochs={run.num_epochs}", "--json",
        # Steps of several records, of one, and of none but padding.
        f"--physical-batch-size={size}",
    ]  # fmt: skip
    # A process of its own: Beam and TensorFlow need not know each other.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise InputError(
            f"Expected dpsgd batches --sampler {run.sampler} to succeed; it said: "
            f"{said}"
        )


def _train(folder: pathlib.Path, run: SmallRun, manifest: Manifest) -> np.ndarray:
    """Returns the released weights after every step, shape (num_steps, canaries)."""
    # Imported here: it loads TensorFlow.
    from trainer.commands import train_request
    from trainer.train import train

    num_steps = manifest.plan.num_steps
    request = train_request(
        [
            f"--batches={folder}/batches", f"--eval={folder}/held-out",
            f"--out={folder}/run", "--model=trainer.audit_model:weights",
            "--loss=trainer.audit_model:linear", "--optimizer=sgd",
            "--learning-rate=1", f"--noise-multiplier={run.noise_multiplier!r}",
            f"--l2-norm-clip={run.l2_norm_clip!r}", f"--keep-last={num_steps}",
            "--keep-every=1", f"--embedding-noise={run.embedding_noise}",
        ]
    )  # fmt: skip
    train(request)
    files = [folder / f"run/iterates/step-{t + 1:08d}.npz" for t in range(num_steps)]
    arrays = []
    for file in files:
        with np.load(file) as found:
            arrays.append(found["weight_0"][:, 0])
    return np.stack(arrays)


def _score(iterates: np.ndarray, run: SmallRun, plan: DpSgdPlan) -> np.ndarray:
    """Returns the score of every canary from the weights after every step."""
    first = np.zeros((1, iterates.shape[1]), iterates.dtype)
    steps = np.diff(np.concatenate([first, iterates]), axis=0)
    sums = steps * (plan.expected_batch_size / run.l2_norm_clip)
    return audit_mechanism.score(
        plan,
        run.noise_multiplier,
        sums.__getitem__,
        positions=np.arange(iterates.shape[1]),
    )
