"""The whole trainer under audit: real batches, a real run, and what it releases.

A table of canaries goes through the batch job and the trainer, as a user's rows do:
sampling, Beam job, batch files, padding, clipping, noise, optimizer, checkpoints.
Every canary has weights of its own in several layers (see ``audit_model``); a fair coin
decides whether it is real or a ghost.  What is released is looked at in two ways:

  - Trials: what a release adds along the gradient of a canary, times b over the
    learning rate and the clip norm, is 1 for each step that the canary took part in,
    plus noise.  One trial per canary, scored as in ``audit_mechanism``: a bound on
    epsilon that assumes nothing.
  - Checks: less what the batches say that canaries contributed, only noise is left
    (see ``audit_release``).  They find small faults, and refute that the trainer is the
    mechanism that epsilon was proven for.

There are four kinds of small runs, each judged by itself: dense and lazy noise, of many
canaries; and the same of so few that steps are empty, the dense one on the vectorised
path.  Sampler, noise multiplier and clip norm are those asked for; examples and steps
are few.  Trials are held against the accountant's claim for the small run.

Formal guarantees:
  - The only inputs are the iterates that the run released, its batches and manifest.
  - The labels are fair coin flips from the operating system; every run has new keys.
  - The trials of one run are independent as far as the sampler's rows and the noise's
    values are, which their modules guarantee and their tests check.  Under shuffles, of
    fixed batch sizes, and under truncation rows are nearly so.
  - Each fault that ``tests/trainer/auditing/test_audit_faults.py`` plants is found.

Public: everything, since nobody's data is in it.

References:
  Steinke, Nasr and Jagielski (2023), arXiv:2305.08846, for many canaries in one run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import secrets
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np

from accounting.auditing.joint_tests import Evidence
from accounting.auditing.residuals import Check
from accounting.plan import DpSgdPlan
from accounting.samplers import truncated_poisson
from pipelines.batches.manifest import Manifest, read_manifest
from pipelines.files import separate_process
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from trainer.auditing import audit_mechanism
from trainer.run.preflight import Request
from trainer.settings.train_settings import DENSE_NOISE, LAZY_NOISE, TrainSettings

#: Canaries of a run: trials.
NUM_CANARIES = 4096
#: Canaries, and steps, of a run with about one canary per step: a third are empty.
_NUM_FEW = 32
_MOST_STEPS = 16
_MOST_EPOCHS = 2
#: Gradient norms of canaries, over the clip norm; and at least.
_SLOPE = 10.0
_LEAST_SLOPE = 1.0
#: Row groups of the table, so that the batch job has several blocks.
_NUM_BLOCKS = 3
#: Steps between two releases of a lazy run, in which rows wait for their noise.
_LAZY_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A run that is small enough to be carried out, and like the audited one.

    Attributes:
      sampler: Of the audited plan.
      steps_per_epoch: At most that of the audited plan, but for few canaries.
      num_epochs: At most that of the audited plan.
      noise_multiplier: Of the audited run.
      l2_norm_clip: Of the audited run.
      embedding_noise: How tables get their noise: "dense" or "lazy".
      num_canaries: Rows of its data.
      physical_batch_size: Rows of a physical batch.
      model: Function of ``audit_model``.
    """

    sampler: str
    steps_per_epoch: int
    num_epochs: int
    noise_multiplier: float
    l2_norm_clip: float
    embedding_noise: str
    num_canaries: int
    physical_batch_size: int
    model: str

    @property
    def name(self) -> str:
        """What sets it apart from the other kinds."""
        return (
            self.embedding_noise if self.has_trials else f"{self.embedding_noise}, few"
        )

    @property
    def has_trials(self) -> bool:
        """Whether it has enough canaries to bound epsilon."""
        return self.num_canaries == NUM_CANARIES

    @property
    def expected_batch_size(self) -> int:
        """Examples of a step: those of an epoch are spread over its steps."""
        return self.num_canaries // self.steps_per_epoch

    @property
    def steps_per_release(self) -> int:
        """Steps between two releases: of lazy noise several, or none would be late."""
        lazy = self.embedding_noise == LAZY_NOISE
        return min(_LAZY_STEPS, self.steps_per_epoch) if lazy else 1


_MODELS = "trainer.auditing.audit_model"
_WEIGHTS, _SHARED = "weights", "shared_weights"


def small_runs(
    plan: DpSgdPlan, noise_multiplier: float, l2_norm_clip: float
) -> list[SmallRun]:
    """Returns one small run of every kind for an audited plan.

    Args:
      plan: Of the audited batches.
      noise_multiplier: Of the audited run.
      l2_norm_clip: Of the audited run.
    """
    # A power of two divides the canaries.
    steps = 1 << (min(plan.steps_per_epoch, _MOST_STEPS).bit_length() - 1)
    size = NUM_CANARIES // steps
    kinds = (
        # Where sizes vary, half of the steps have one physical batch; or none has.
        (DENSE_NOISE, NUM_CANARIES, steps, size, _WEIGHTS),
        (LAZY_NOISE, NUM_CANARIES, steps, -(-3 * size // 8), _WEIGHTS),
        # One batch per step, but for one step in 10^14.
        (DENSE_NOISE, _NUM_FEW, _NUM_FEW, 16, _SHARED),
        (LAZY_NOISE, _NUM_FEW, _NUM_FEW, 2, _WEIGHTS),
    )
    return [
        SmallRun(
            sampler=plan.sampler,
            steps_per_epoch=steps_per_epoch,
            num_epochs=min(plan.num_epochs, _MOST_EPOCHS),
            noise_multiplier=noise_multiplier,
            l2_norm_clip=l2_norm_clip,
            embedding_noise=embedding_noise,
            num_canaries=num_canaries,
            physical_batch_size=physical,
            model=model,
        )
        for embedding_noise, num_canaries, steps_per_epoch, physical, model in kinds
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one small run gives.

    Attributes:
      run: What was carried out.
      plan: Of its batches.
      real: Scores of real canaries; none of a run without trials.
      ghost: Scores of ghosts, likewise.
      checks: Of what it released.
    """

    run: SmallRun
    plan: DpSgdPlan
    real: np.ndarray
    ghost: np.ndarray
    checks: list[Check]

    @property
    def slack(self) -> float:
        """Probability that a step is truncated, which would tie rows together."""
        return truncated_poisson.any_truncation_probability(self.plan)


def runs(
    plan: DpSgdPlan, noise_multiplier: float, l2_norm_clip: float, trials: int
) -> list[SmallRun]:
    """Returns the small runs of an audit: one of every kind, and more for more trials.

    Args:
      plan: Of the audited batches.
      noise_multiplier: Of the audited run.
      l2_norm_clip: Of the audited run.
      trials: At least so many in all, the same number of each kind that has any.
    """
    kinds = small_runs(plan, noise_multiplier, l2_norm_clip)
    with_trials = [run for run in kinds if run.has_trials]
    times = max(1, -(-trials // (len(with_trials) * NUM_CANARIES)))
    return kinds + with_trials * (times - 1)


def evidence(outcomes: Sequence[Outcome]) -> list[Evidence]:
    """Returns what the outcomes of each kind of run give together."""
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.run.name, []).append(outcome)
    return [
        Evidence(
            name=name,
            real=np.concatenate([outcome.real for outcome in found]),
            ghost=np.concatenate([outcome.ghost for outcome in found]),
            slack=sum(outcome.slack for outcome in found),
            checks=tuple(check for outcome in found for check in outcome.checks),
        )
        for name, found in by_kind.items()
    ]


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
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainer.auditing.audit_model import CANARY, LAYERS, directions

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
    # Imported here: it loads TensorFlow.
    from trainer.auditing import audit_release

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
    from trainer.auditing import audit_model

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
    # Imported here: it loads TensorFlow.
    from trainer.train import train

    num_steps, every = manifest.plan.num_steps, run.steps_per_release
    settings = TrainSettings(
        model=f"{_MODELS}:{run.model}",
        loss=f"{_MODELS}:linear",
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
    # Releases of several steps are scored as steps of as many more examples.  A score
    # may be any; this is the best one but for samplers that take an example twice.
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
