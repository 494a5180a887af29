"""The cases of a comparison, their noise, and their batches and runs in a folder.

A case is one line of the table: how batches are made, the settings of training, and the
rule that chose the noise.  Its runs differ only in their seed.

    OUT/batches/BATCHES-seed0/            batches, which runs share
    OUT/runs/NAME-seed0/                  one training run per trial
    OUT/runs/NAME-seed0.settings.json     the request of that run

A target (epsilon, delta) needs different noise with different samplers, which is the
subject of Scalable DP-SGD (Chua et al. 2024, arXiv:2411.04205, Section 4).  Each
sampler gets the noise that the accountant, or the theorem of the method, proves to
suffice for its plan; a sampler that the theorem does not cover is refused.  A given
noise multiplier is used unchanged, for all samplers.

Cases that share sampler, batch size, epochs and seed share their batches; two different
cases with one name are refused.  Finished batches and runs are not made again, and an
unfinished run continues where it was.  Batches are used only if they have the requested
plan, rows of the same table, and a key of their own; a finished run only if it was made
with the settings and folders of the trial.  What is stated of a run is computed from
its record, as by ``dpsgd account``.

Public: what the runs publish.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

from accounting.core.plan import DpSgdPlan, check_epochs
from accounting.core.validation import InputError, check_choice
from pipelines.batches.folder import (
    MANIFEST_NAME,
    read_checksums,
    read_manifest,
    stored,
)
from pipelines.core.users import UserBound
from pipelines.files import processes
from pipelines.files.storage import pretty_json, write_atomically
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.inputs.source_table import SourceTable, table_of
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from trainer.core.run.run_record import read_run
from trainer.model.evaluation import HeldOut
from trainer.model.metrics import METRICS, name_of
from trainer.model.user_code import check_views, load_function
from trainer.report.run_files import METRICS_NAME, read_metrics
from trainer.run import privacy
from trainer.run.preflight import (
    Request,
    check_files_of,
    is_finished,
    with_loss,
)
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.requests import AUTO_METRIC, ComparisonSettings, Experiment
from trainer.settings.train_settings import TrainSettings, number_in_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One run.

    Attributes:
      name: Name of the run's folder.
      batches: Name of the folder of the run's batches.
      settings: Settings of the run's training.
    """

    name: str
    batches: str
    settings: TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonCase:
    """Runs that differ only in their seed.

    Attributes:
      batches: How batches are made.
      settings: Settings of training, with the noise.
      target_epsilon: Target that the noise was chosen for; None without a target.
    """

    batches: BatchSettings
    settings: TrainSettings
    target_epsilon: float | None = None

    @property
    def name(self) -> str:
        """Name of the runs, without the seed."""
        settings = self.settings
        words = [name_of_batches(self.batches), settings.method]
        if self.target_epsilon is not None:
            words.append(f"eps{self.target_epsilon:g}")
        elif settings.noise_multiplier is not None:
            words.append(f"noise{settings.noise_multiplier:g}")
        words.append(f"lr{number_in_words(settings.learning_rate)}")
        if settings.l2_norm_clip is not None:
            words.append(f"clip{number_in_words(settings.l2_norm_clip)}")
        words += [
            f"{name.replace('_', '-')}{value}"
            for name, value in settings.method_settings.items()
        ]
        # A setting that is text must not change the folder.
        return re.sub(r"[^\w.+-]", "_", "-".join(words))

    def name_of_batches(self, seed: int) -> str:
        """Returns the name of the folder of the batches."""
        return f"{name_of_batches(self.batches)}-seed{seed}"

    def trial(self, seed: int) -> Trial:
        """Returns the run of one seed, with its own initial weights."""
        return Trial(
            name=f"{self.name}-seed{seed}",
            batches=self.name_of_batches(seed),
            settings=dataclasses.replace(self.settings, init_seed=seed),
        )


def name_of_batches(batches: BatchSettings) -> str:
    """Returns the name of a way of making batches.

    Example:
      >>> name_of_batches(BatchSettings(expected_batch_size=256, num_epochs=3))
      'truncated-poisson-b256-e3'
    """
    length = f"e{batches.num_epochs}" if batches.num_epochs else f"t{batches.num_steps}"
    return f"{batches.sampler}-b{batches.expected_batch_size}-{length}"


def without_repetition(cases: Iterable[ComparisonCase]) -> list[ComparisonCase]:
    """Returns every case once, in order of first occurrence.

    Raises:
      InputError: two different cases have the same name.
    """
    found: dict[str, ComparisonCase] = {}
    for case in cases:
        if found.setdefault(case.name, case) != case:
            raise InputError(
                f"Expected runs {case.name} to have the same settings: they differ in "
                "more than method, target, noise, learning rate, clip norm, settings "
                "of the method, batch size and epochs. Compare them in separate --out "
                "folders."
            )
    return list(found.values())


def is_private(settings: TrainSettings) -> bool:
    """Returns whether a run clips and adds noise."""
    return settings.method != NON_PRIVATE


#: Called with each line of progress.
Say = Callable[[str], None]


def silent(line: str) -> None:
    """Ignores a line of progress."""
    del line


class Runs:
    """Makes batches and runs in the folder ``out``.

    Args:
      experiment: Data, folders, and everything else that all runs share.
      say: Called with each line of progress.
    """

    def __init__(self, experiment: Experiment, say: Say) -> None:
        self._experiment, self._say = experiment, say
        self._keys: dict[str, str] = {}

    def make_batches(self, name: str, settings: BatchSettings, plan: DpSgdPlan) -> None:
        """Makes batches, unless they exist.

        Args:
          name: Name of their folder.
          settings: How to sample.
          plan: The plan that the batches must have.

        Raises:
          InputError: the batches are refused, have another plan or other rows, or are
            those of another folder.
        """
        folder = self._batches(name)
        if not (folder / MANIFEST_NAME).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._say(f"batches: {name}")
            source = self._experiment.source
            processes.call(MAKE_BATCHES, source, str(folder), settings)
        table = SourceTable.from_json(read_checksums(folder).table)
        if read_manifest(folder).plan != plan or table != self._table:
            raise InputError(
                f"Expected the batches in {folder} to have the requested plan, and "
                f"rows of {self._experiment.source} as it is now; they have others. "
                "Give the same command, or another --out."
            )
        if (other := self._keys.setdefault(stored(folder).key_name(), name)) != name:
            raise InputError(
                f"Expected the batches in {folder} to have a key of their own; it is "
                f"that of {other}, and the epsilons of runs on both do not add. Remove "
                "one of them, and give the same command."
            )

    @functools.cached_property
    def _table(self) -> SourceTable:
        return table_of(list_blocks(self._experiment.source, of_numbers=False))

    def _batches(self, name: str) -> pathlib.Path:
        return self._experiment.out / "batches" / name

    def run(self, trial: Trial) -> dict[str, Any]:
        """Trains a trial in this process, unless it is done; see `result`.

        Raises:
          InputError: the trainer refuses it, or it was made with other settings.
        """
        request = self.unfinished(trial)
        if request is not None:
            self._say(f"training: {trial.name}")
            train_here(request)
        return self.result(trial)

    def unfinished(self, trial: Trial) -> Request | None:
        """Returns the request of a run that is not finished; None if it is.

        Raises:
          InputError: the run was made or begun with other settings.
        """
        request = self.request(trial)
        path, is_done = settings_path(request.run), is_finished(request.run)
        if path.exists() and path.read_bytes() != _settings_of(request):
            raise InputError(
                f"Expected {request.run} to have the settings given now; {path.name} "
                "beside it has others. Give the same settings, or another --out."
            )
        if is_done and not path.exists():
            raise InputError(
                f"Expected {path} to hold the settings of the finished run beside it. "
                "Restore it, or give another --out."
            )
        return None if is_done else request

    def result(self, trial: Trial) -> dict[str, Any]:
        """Returns the "metrics" of a finished run, and the "privacy" of its record.

        Raises:
          InputError: a file is missing or was edited.
        """
        run = self.request(trial).run
        record, manifest = read_run(run)
        large = trial.settings.allow_large_delta
        _, said = privacy.stated(run, record, manifest, allow_large_delta=large)
        return {"metrics": read_metrics(run / METRICS_NAME), "privacy": said}

    def request(self, trial: Trial) -> Request:
        """Returns the request of a trial to the trainer.

        Raises:
          InputError: a folder is not on this machine.
        """
        experiment = self._experiment
        return Request(
            settings=trial.settings,
            batches=self._batches(trial.batches),
            held_out=experiment.held_out,
            run=experiment.out / "runs" / trial.name,
            batches_used_before=True,  # by other trials: an experiment, not a release
            checkpoint_every=experiment.checkpoint_every,
        )


def settings_path(run: pathlib.Path) -> pathlib.Path:
    """Returns the file that holds the request of a run."""
    return run.with_name(f"{run.name}.settings.json")


def _settings_of(request: Request) -> bytes:
    return pretty_json(json.loads(json.dumps(dataclasses.asdict(request), default=str)))


def note(request: Request) -> None:
    """Writes the request of a run, before the run begins."""
    path = settings_path(request.run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _settings_of(request))


def train_here(request: Request) -> None:
    """Writes the request, and trains in this process."""
    note(request)
    # Imported here: it loads TensorFlow.
    from trainer.train import train

    train(request)


def settled(settings: ComparisonSettings) -> tuple[ComparisonSettings, Dataset]:
    """Returns settings without "auto" for loss and metric, and the training examples.

    Training would refuse the rest, but only after the batches are made.

    Raises:
      InputError: there is no such metric; a folder is not on this machine; or the
        held-out files are of other columns or types, or among the training examples.
    """
    dataset = list_blocks(settings.source)
    described = dataset.description
    trained = tuple(with_loss(each, described) for each in settings.trained)
    metric = settings.metric
    if metric == AUTO_METRIC:
        metric = METRICS[trained[0].task][0]
    found = dataclasses.replace(settings, trained=trained, metric=metric)
    for each in trained:
        Runs(found, silent).request(Trial(name="", batches="", settings=each))
        check_files_of(each)
        known = METRICS[each.task]
        if each.metric is not None:
            known = (*known, name_of(load_function(each.metric, "metric")))
        check_choice("metric", metric, known)
        check_views(each.views, each.augment)
    HeldOut(settings.held_out, dataset.columns, described, dataset.footers.values())
    return found, dataset


def check_plans(settings: ComparisonSettings, num_examples: int) -> None:
    """Refuses a comparison with an impossible plan.

    Args:
      settings: What to compare.
      num_examples: Number of slots in the data set.

    Raises:
      InputError: a value of a plan is out of range.
    """
    for sampler in settings.samplers:
        for batches in settings.batches_of(sampler):
            plan = batches.plan(num_examples)
            check_epochs(plan)
            for training in settings.trained:
                training.check_steps(plan.num_steps)


def find_cases(
    settings: ComparisonSettings,
    num_examples: int,
    say: Say,
    bounded: UserBound | None = None,
) -> list[ComparisonCase]:
    """Returns all cases with their noise.

    Args:
      settings: What to compare.
      num_examples: Number of slots in the data set.
      say: Called with each line of progress.
      bounded: How the users of the data set are bounded; None protects examples.

    Raises:
      InputError: a method has no accounting, or none for one of the samplers, or a
        target is out of reach.
    """
    cases = list[ComparisonCase]()
    for batches in zip(*map(settings.batches_of, settings.samplers), strict=True):
        for each in settings.trained:
            cases += [ComparisonCase(batches=b, settings=each) for b in batches]
    for case in cases:
        if is_private(case.settings) and (
            theorem := privacy.theorem_of_settings(case.settings)
        ):
            theorem.check_plan(case.batches.plan(num_examples))
    found = [_with_noise(case, num_examples, bounded) for case in cases]
    for case in found:
        if case.target_epsilon is not None:
            say(f"noise {case.settings.noise_multiplier:.4f}: {case.name}")
    return without_repetition(found)


def _with_noise(
    case: ComparisonCase, num_examples: int, bounded: UserBound | None
) -> ComparisonCase:
    """Returns a case with a target as one with the noise that is proven for it."""
    settings = case.settings
    target, delta = settings.target_epsilon, settings.target_delta
    if target is None:
        return case
    assert delta is not None  # of every target
    noise = _bounds(
        case.batches.plan(num_examples),
        epsilon=target,
        delta=delta,
        theorem=privacy.theorem_of_settings(settings),
        bounded=bounded,
    ).guarantee
    settings = dataclasses.replace(
        settings, target_epsilon=None, noise_multiplier=noise
    )
    return dataclasses.replace(case, settings=settings, target_epsilon=target)


#: Many cases have one plan and target.
_bounds = functools.lru_cache(privacy.noise_bounds)
