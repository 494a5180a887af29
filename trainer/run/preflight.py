"""The checks of a run that precede any work and need no TensorFlow.

`check` writes nothing.  It refuses a request unless the manifest is unchanged, the
batch files exist, the held-out examples have the columns of the batches and are in none
of the files that these were sampled from, the noise multiplier meets the target for the
plan, and the output folder is new, or that of an unfinished run.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Set
from typing import Any

from accounting.core import claim
from accounting.core.plan import TRUNCATED_POISSON, DpSgdPlan
from accounting.core.validation import InputError
from pipelines.batches import first_use
from pipelines.batches.folder import (
    MANIFEST_NAME,
    PRIVATE_NAME,
    check_certificate,
    read_checksums,
    read_manifest,
)
from pipelines.core.batches.manifest import Manifest
from pipelines.core.users import Bounded
from pipelines.files.outputs import check_folder
from pipelines.files.storage import StrPath, join, read_json, sizes
from pipelines.tables.schema import DATASET_NAME
from trainer.core.run import arithmetic
from trainer.core.run.run_record import RECORD_NAME, RunRecord, read_run_id
from trainer.model.evaluation import HeldOut
from trainer.model.metrics import BINARY, LABEL, OTHER
from trainer.model.user_code import check_views, functions_of, load_function
from trainer.report.run_files import RUN_NAMES
from trainer.run import privacy
from trainer.settings.methods import DP_SGD, NON_PRIVATE, gradients_text
from trainer.settings.requests import Request as Request
from trainer.settings.requests import check_local as check_local
from trainer.settings.train_settings import (
    AUTO_LOSS,
    LAZY_NOISE,
    LOSSES_OF_LABELS,
    TrainSettings,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A request that passed all checks.

    Attributes:
      request: The request.
      manifest: Manifest of the batches.
      held_out: The held-out examples; None without any, and for a worker that does
        not evaluate.
      noise_multiplier: The given one, or that of the target; None without noise.
      resumes: Whether the run folder holds this run, unfinished.
    """

    request: Request
    manifest: Manifest
    held_out: HeldOut | None
    noise_multiplier: float | None
    resumes: bool


def check(request: Request, *, chief: bool = True) -> Checked:
    """Returns the request, or refuses it with an InputError.

    Args:
      request: The request.
      chief: Whether this worker evaluates and writes the folder of the run.
    """
    arithmetic.variables()
    check_folder(request.batches, "--batches")
    manifest = read_manifest(request.batches)
    request = dataclasses.replace(
        request, settings=with_loss(request.settings, manifest.dataset)
    )
    _check_columns(manifest, request.settings.task)
    check_views(request.settings.views, request.settings.augment)
    check_files_of(request.settings)
    check_settings(request.settings, manifest)
    check_files(request.batches, manifest)
    held_out = None
    if request.held_out is not None and chief:
        input_digests = read_checksums(request.batches).inputs
        held_out = HeldOut(
            request.held_out, manifest.columns, manifest.dataset, input_digests
        )
    resumes = chief and check_run_folder(request.run)
    if chief:
        check_unused(
            request.batches,
            request.run,
            request.settings,
            shared=request.batches_used_before,
        )
    noise_multiplier = noise_multiplier_of(request.settings, manifest)
    settings = request.settings.for_plan(manifest.plan, noise_multiplier)
    request = dataclasses.replace(request, settings=settings)
    return Checked(
        request=request,
        manifest=manifest,
        held_out=held_out,
        noise_multiplier=noise_multiplier,
        resumes=resumes,
    )


def with_loss(settings: TrainSettings, dataset: Mapping[str, Any]) -> TrainSettings:
    """Returns settings whose "auto" loss is replaced by that of the label.

    Args:
      settings: Settings of a run.
      dataset: The description of the prepared data.

    Raises:
      InputError: a setting does not suit the loss.
    """
    if settings.loss != AUTO_LOSS:
        return settings
    # Data without a schema is Criteo's, or a user's own with labels 0 and 1.
    task = dataset["label"]["task"] if dataset.get("name") == DATASET_NAME else BINARY
    return dataclasses.replace(settings, loss=LOSSES_OF_LABELS[task][0])


def check_settings(settings: TrainSettings, manifest: Manifest) -> None:
    """Refuses settings that do not suit the batches, for which nothing is proven.

    Args:
      settings: Settings of the run.
      manifest: Manifest of the batches.

    Raises:
      InputError: initial weights of these batches, fewer steps than settings need, or
        a method without a theorem for sampler, unit, or bands.
    """
    _check_initial_weights(settings, manifest)
    settings.check_steps(manifest.plan.num_steps)
    if settings.method == NON_PRIVATE:
        return
    _check_bands(settings, manifest.plan)
    gradients_text(settings.method, settings.method_settings)
    theorem = privacy.theorem_of_settings(settings)
    claim.plan_of_all(manifest.plan, settings.of_runs, theorem)
    if theorem is not None:
        theorem.check_plan(manifest.plan)
        claim.check_unit(theorem, privacy.count_of(manifest.dataset))
    privacy.unit_of(manifest.dataset, manifest.plan, theorem)


def needs_independent_noise(settings: TrainSettings) -> str | None:
    """Returns which setting excludes noise of bands; None if none does.

    Args:
      settings: Settings of the run.
    """
    if settings.method not in (DP_SGD, NON_PRIVATE):
        return f"method={settings.method!r}"
    if settings.method == DP_SGD and settings.embedding_noise == LAZY_NOISE:
        return f"embedding_noise={LAZY_NOISE!r}"
    return None


def _check_bands(settings: TrainSettings, plan: DpSgdPlan) -> None:
    """Refuses what is not proven, or not exact, with noise of bands."""
    asked = needs_independent_noise(settings)
    if plan.bands is None or asked is None:
        return
    raise InputError(
        f"Expected batches without bands for {asked}, which is proven for noise that "
        f"is independent between steps; these have bands={plan.bands}. Make others: "
        f"`dpsgd batches --sampler {TRUNCATED_POISSON} --bands 1 "
        f"--batch-size {plan.expected_batch_size} --num-steps {plan.num_steps}`, with "
        "their --input and another --out."
    )


def check_files_of(settings: TrainSettings) -> None:
    """Refuses settings that name functions or weights which do not exist.

    Raises:
      InputError: a module lacks the function or raises, or there is no such file of
        weights.
    """
    _weights_file(settings)
    for option, spec in functions_of(settings).items():
        load_function(spec, option)


def _weights_file(settings: TrainSettings) -> pathlib.Path | None:
    """Returns the file of initial weights; refuses one that does not exist."""
    if settings.initial_weights is None:
        return None
    path = pathlib.Path(settings.initial_weights)
    check_local(initial_weights=path)
    if not path.is_file():
        raise InputError(
            f"Expected initial_weights={path} to be a file. Give one, or omit "
            "--initial-weights."
        )
    return path


def _check_initial_weights(settings: TrainSettings, manifest: Manifest) -> None:
    """Refuses initial weights that do not exist or come from the same batches."""
    path = _weights_file(settings)
    # Models are in a run's folder, iterates in a folder below it.
    for folder in path.resolve().parents[:2] if path else ():
        if not (folder / MANIFEST_NAME).exists():
            continue
        if read_json(folder / MANIFEST_NAME).get("batches_id") == manifest.batches_id:
            raise InputError(
                f"Expected initial_weights={path} to be public; they are of a run on "
                "these very batches, with which nothing is proven together. Omit "
                "--initial-weights, or give weights of a run on public data."
            )


def _check_columns(manifest: Manifest, task: str) -> None:
    shapes = {column.name: column.shape for column in manifest.columns}
    if task != OTHER and LABEL not in shapes:
        raise InputError(
            f"Expected a column {LABEL!r} in the batches, which is what is predicted; "
            f"they have {', '.join(sorted(shapes))}. Rename one in the input, or let "
            "`dpsgd schema TABLE --label COLUMN` write a schema that does."
        )
    if task == BINARY and shapes[LABEL] != ():
        raise InputError(
            f"Expected column {LABEL!r} of the batches to hold one number per example. "
            "For a list of them choose another --loss."
        )


def check_files(directory: StrPath, manifest: Manifest) -> None:
    """Refuses a folder in which a batch file is missing or has another size.

    A folder with a certificate of other batches is refused, too.  Digests are checked
    later, as the files are read.

    Args:
      directory: Folder of the batches, here or in a store.
      manifest: Manifest of the batches.

    Raises:
      InputError: a file is missing, or of another size; or as ``check_certificate``.
    """
    checksums, found = read_checksums(directory), sizes(directory)
    for file in manifest.files:
        if checksums.of_file(file).size != found.get(file.name):
            raise InputError(
                f"Expected batch file {join(directory, file.name)} to be as it was "
                "written; it is missing or was changed. Restore it, or make the "
                "batches again."
            )
    check_certificate(directory, manifest, checksums)


def check_unused(
    batches: StrPath, run: pathlib.Path, settings: TrainSettings, *, shared: bool
) -> None:
    """Refuses batches that another private run has used.

    Args:
      batches: Folder of the batches, here or in a store.
      run: Folder of the run, which may go on.
      settings: Settings of the run.
      shared: Whether such batches are accepted.

    Raises:
      InputError: as ``first_use.check``; or they are accepted, and the run is one of
        several that were declared together.
    """
    if shared and settings.of_runs != 1:
        raise InputError(
            f"Expected of_runs={settings.of_runs} to be 1 beside batches_used_before: "
            "each of the runs has batches of its own. Make others, by `dpsgd batches` "
            "with another --out."
        )
    if settings.method != NON_PRIVATE and not shared:
        first_use.check(batches, read_run_id(run))


def is_finished(run: pathlib.Path) -> bool:
    """Returns whether a folder holds a complete run."""
    path = run / RECORD_NAME
    return path.exists() and bool(read_json(path)["complete"])


def check_run_folder(run: pathlib.Path) -> bool:
    """Returns whether the folder holds an unfinished run.

    Batches that `dpsgd.make_private` made in ``private`` are no run yet.

    Raises:
      InputError: the folder holds something else.
    """
    check_folder(run, "--out")
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return False
    names = {path.name for path in run.iterdir()} if run.is_dir() else {""}
    check_unfinished(run, names)
    return bool(read_run_id(run))


def check_unfinished(run: StrPath, names: Set[str]) -> None:
    """Refuses a folder with anything but an unfinished run.

    Args:
      run: Folder, here or in a store.
      names: Names of the files and folders in it.

    Raises:
      InputError: the folder holds something else.
    """
    refusal = f"Expected --out {run} to be new or empty. Choose another folder."
    # A kill may leave temporary files, whose names start with a dot.
    if PRIVATE_NAME not in names or any(
        name not in RUN_NAMES and not name.startswith(".") for name in names
    ):
        raise InputError(refusal)
    if RECORD_NAME in names:
        record = RunRecord.from_json(read_json(join(run, RECORD_NAME)))
        if record.complete:
            raise InputError(f"{refusal} It holds a finished run.")


def noise_multiplier_of(settings: TrainSettings, manifest: Manifest) -> float | None:
    """Returns the given noise multiplier, or that of the target; None without noise.

    Args:
      settings: Settings with a noise multiplier, or with target epsilon and delta.
      manifest: Manifest of the batches, which has the plan.

    Raises:
      InputError: no noise reaches the target.
    """
    if settings.method == NON_PRIVATE:
        return None
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    assert settings.target_epsilon is not None  # checked by the settings
    assert settings.target_delta is not None
    return privacy.noise_bounds(
        manifest.plan,
        epsilon=settings.target_epsilon,
        delta=settings.target_delta,
        theorem=privacy.theorem_of_settings(settings),
        bounded=Bounded.of(manifest.dataset),
        of_runs=settings.of_runs,
    ).guarantee
