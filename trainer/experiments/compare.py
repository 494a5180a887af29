"""Many runs that differ in a few things, and what came out: one table.

    OUT/batches/SAMPLER-seed0/            batches, once per sampler and seed
    OUT/runs/NAME-seed0/                  one training run per trial
    OUT/runs/NAME-seed0.settings.json     what that run was asked to do
    OUT/comparison.json, .md, .png        the table, for machines, people and eyes

Every seed has batches, initial weights and noise of its own.  Batches are made in a
process of their own, since Beam and TensorFlow need not know each other; runs are
trained in this one, one after the other.

Formal guarantees:
  - A comparison that was stopped goes on with the same settings: finished batches and
    runs are not made again, and an unfinished run continues where it was.
  - Batches that are found finished are taken only if they are of the data set's size,
    the batch size and the steps that are asked for.
  - A run that is found finished is taken only if it was asked for with the settings
    and folders of the trial, and trained by the user's code as it is now.
  - ``summarise`` reports every group of trials, with mean and sample standard deviation
    over its seeds, whatever came out.

Public: what the runs publish.  Choosing among runs on the same data costs privacy that
no statement of a single run covers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from accounting import deltas
from accounting.plan import steps_and_epochs
from accounting.validation import InputError, check_choice
from pipelines.batches.manifest import (
    MANIFEST_NAME,
    pretty_json,
    read_json,
    read_manifest,
    write_atomically,
)
from pipelines.files import separate_process
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from trainer.model.evaluation import check_apart
from trainer.model.metrics import METRICS, name_of
from trainer.model.user_code import load_function
from trainer.run import origin, privacy
from trainer.run.preflight import Request
from trainer.run.run_record import METRICS_NAME, PRIVACY_NAME, RECORD_NAME
from trainer.settings.comparison_settings import LAST, ComparisonSettings, Experiment
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.train_settings import TrainSettings

#: Takes a line of progress.
Say = Callable[[str], None]


def silent(line: str) -> None:
    """Says nothing."""
    del line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a comparison.

    Attributes:
      sampler: How its batches were made.
      epsilon: The target that its noise was chosen for; None without privacy.
      seed: Which repetition: of the batches.
      settings: Of its training.
      label: Tells apart trials that differ in other settings alone.
    """

    sampler: str
    epsilon: float | None
    seed: int
    settings: TrainSettings
    label: str = ""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        target = "" if self.epsilon is None else f"-eps{self.epsilon:g}"
        label = f"-{self.label}" if self.label else ""
        method = self.settings.method
        return f"{self.sampler}-{method}{target}-seed{self.seed}{label}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the table: a group of trials that differ in their seed alone.

    Attributes:
      sampler: How the batches were made.
      method: The training method.
      weights: "last", or the average of iterates that was evaluated.
      target_epsilon: What the noise was chosen for; None without privacy.
      noise_multiplier: Of the runs; None without noise.
      epsilon: Proven for these batches; None if nothing is.
      epsilon_lower_bound: No proof can go below; None if unknown.
      metric: Name of the metric.
      mean: Over the seeds.
      stddev: Sample standard deviation over the seeds; None for one seed.
      num_seeds: Trials of the group.
    """

    sampler: str
    method: str
    weights: str
    target_epsilon: float | None
    noise_multiplier: float | None
    epsilon: float | None
    epsilon_lower_bound: float | None
    metric: str
    mean: float
    stddev: float | None
    num_seeds: int


class Comparison:
    """Carries out trials in the folder ``out``.

    Args:
      experiment: Data, folders, and what else all runs have in common.
      say: Takes a line of progress.
      make_batches: "module:function" of source, folder and ``BatchSettings``, which
        runs in a process of its own.
    """

    def __init__(
        self, experiment: Experiment, say: Say, make_batches: str = MAKE_BATCHES
    ) -> None:
        self._experiment, self._say = experiment, say
        self._make_batches = make_batches

    def make_batches(self, settings: BatchSettings, seed: int) -> pathlib.Path:
        """Returns the folder of the batches of one sampler and seed.

        Args:
          settings: How to sample.
          seed: Which repetition.

        Raises:
          InputError: the batches were refused, or the held-out examples are sampled.
        """
        folder = self._batches(settings.sampler, seed)
        if (folder / MANIFEST_NAME).exists():
            return folder
        experiment = self._experiment
        # Training would refuse them, once the batches are made.
        digests = list_blocks(experiment.source).footers.values()
        check_apart(experiment.held_out, digests)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._say(f"batches: {settings.sampler}, seed {seed}")
        separate_process.call(
            self._make_batches, experiment.source, str(folder), settings
        )
        return folder

    def _batches(self, sampler: str, seed: int) -> pathlib.Path:
        return self._experiment.out / "batches" / f"{sampler}-seed{seed}"

    def run(self, trial: Trial) -> dict[str, Any]:
        """Trains a trial, unless it is done, and returns what its run published.

        Raises:
          InputError: refused by the trainer, or done with other settings.
        """
        request = self.request(trial)
        run = request.run
        _check_same(request)
        if _is_finished(run):
            _check_code(run)
        else:
            self._say(f"training: {trial.name}")
            _train(request)
        return {
            name: json.loads((run / file).read_bytes())
            for name, file in (("metrics", METRICS_NAME), ("privacy", PRIVACY_NAME))
        }

    def request(self, trial: Trial) -> Request:
        """Returns what the trainer is asked to do.

        Raises:
          InputError: a folder that is not on this machine.
        """
        experiment = self._experiment
        return Request(
            settings=trial.settings,
            batches=self._batches(trial.sampler, trial.seed),
            held_out=experiment.held_out,
            run=experiment.out / "runs" / trial.name,
            noise_key_file=experiment.noise_key_file,
            checkpoint_every=experiment.checkpoint_every,
        )


def settings_path(run: pathlib.Path) -> pathlib.Path:
    """Returns the file that says what a run was asked to do."""
    return run.with_name(f"{run.name}.settings.json")


def describe(request: Request) -> dict[str, Any]:
    """Returns all that a run is asked to do, JSON-serialisable."""
    fields: dict[str, Any] = json.loads(
        json.dumps(dataclasses.asdict(request), default=str)
    )
    return fields


def _check_same(request: Request) -> None:
    """Refuses a run that was asked for otherwise; notes what a new one is asked."""
    path, asked = settings_path(request.run), describe(request)
    known = path.exists()
    if known and read_json(path) != asked:
        raise InputError(
            f"Expected {request.run} to be of the settings that are asked for now; "
            f"{path.name} beside it says otherwise. Give the same settings, or another "
            "--out."
        )
    if not known and _is_finished(request.run):
        raise InputError(
            f"Expected {path} to say what the finished run beside it was asked to do. "
            "Restore it, or give another --out."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, pretty_json(asked))


def _check_code(run: pathlib.Path) -> None:
    # Runs of an earlier release do not say.
    began_under = origin.read(run)
    edited = began_under and origin.edited_files(began_under)
    if edited:
        raise InputError(
            f"Expected {run} to be of the user's code as it is now; it was edited "
            f"since: {', '.join(edited)}. Restore it, or give another --out."
        )


def _is_finished(run: pathlib.Path) -> bool:
    path = run / RECORD_NAME
    return path.exists() and bool(read_json(path)["complete"])


def _train(request: Request) -> None:
    # Imported here: it loads TensorFlow.
    from trainer.train import train

    train(request)


def check_experiment(experiment: Experiment, settings: TrainSettings) -> None:
    """Accepts an experiment whose runs will have its metric, before any batch is made.

    Args:
      experiment: Of the runs.
      settings: Of one of its runs.

    Raises:
      InputError: there is no such metric, no held-out folder, or a folder that is not
        on this machine.
    """
    trial = Trial(sampler="", epsilon=None, seed=0, settings=settings)
    Comparison(experiment, silent).request(trial)
    check_choice("metric", experiment.metric, _metrics(settings))
    if not experiment.held_out.is_dir():
        raise InputError(
            f"Expected --eval {experiment.held_out} to be a folder. Give one that "
            "`dpsgd prepare` wrote."
        )


def _metrics(settings: TrainSettings) -> tuple[str, ...]:
    """Returns the names of the metrics that a run will have."""
    known = METRICS[settings.task]
    if settings.metric is None:
        return known
    # What a metric of the user's own is called is known when it is loaded.
    return (*known, name_of(load_function(settings.metric, "metric")))


def compare(
    settings: ComparisonSettings, say: Say = silent, make_batches: str = MAKE_BATCHES
) -> list[Outcome]:
    """Makes all batches and runs that are not done yet, and returns the table.

    Args:
      settings: What is compared.
      say: Takes a line of progress.
      make_batches: As in ``Comparison``.

    Raises:
      InputError: before any batch is made, for what the trainer would refuse; later for
        batches or runs that are of other settings.
    """
    for each in settings.trained:
        check_experiment(settings, each)
    num_examples = list_blocks(settings.source).num_examples
    _sizes_asked_for(settings.batches, num_examples)
    comparison = Comparison(settings, say, make_batches)
    noise = _noise(comparison, settings, num_examples)
    for delta in settings.deltas:
        if warning := deltas.warning(delta, num_examples):
            say(warning)
    trials = _trials(settings, noise)
    results = []
    for number, trial in enumerate(trials, start=1):
        say(f"[{number}/{len(trials)}] {trial.name}")
        results.append((trial, comparison.run(trial)))
    return summarise(results, metric=settings.metric)


def _sizes_asked_for(
    batches: BatchSettings, num_examples: int
) -> tuple[int, int, int, int]:
    """Returns what the plans of all samplers have in common; their caps may differ."""
    size = batches.expected_batch_size
    num_steps, num_epochs = steps_and_epochs(
        num_examples, size, epochs=batches.num_epochs, num_steps=batches.num_steps
    )
    return num_examples, size, num_steps, num_epochs


def _check_sizes(
    folder: pathlib.Path, batches: BatchSettings, num_examples: int
) -> None:
    plan = read_manifest(folder).plan
    found = plan.num_examples, plan.expected_batch_size, plan.num_steps, plan.num_epochs
    if found != _sizes_asked_for(batches, num_examples):
        raise batches_of_another_plan(folder)


def batches_of_another_plan(folder: pathlib.Path) -> InputError:
    """Returns the error for finished batches that were not asked for."""
    return InputError(
        f"Expected the batches in {folder} to be of the plan that is asked for now; "
        "they are of another. Give the same command, or another --out."
    )


def _noise(
    comparison: Comparison, settings: ComparisonSettings, num_examples: int
) -> dict[float, float]:
    """Makes all batches; returns the noise multiplier of each target."""
    folders = []
    for sampler, seed in itertools.product(settings.samplers, range(settings.seeds)):
        folders.append(comparison.make_batches(settings.batches_of(sampler), seed))
        _check_sizes(folders[-1], settings.batches, num_examples)
    plan = read_manifest(folders[0]).plan
    return {
        epsilon: privacy.noise_multiplier(plan, epsilon=epsilon, delta=delta)
        for delta in settings.deltas
        for epsilon in settings.epsilons
    }


def _trials(settings: ComparisonSettings, noise: dict[float, float]) -> list[Trial]:
    return [
        Trial(
            sampler=sampler,
            epsilon=each.target_epsilon,
            seed=seed,
            settings=dataclasses.replace(
                each,
                target_epsilon=None,
                noise_multiplier=each.target_epsilon and noise[each.target_epsilon],
                init_seed=seed,
            ),
        )
        for each in settings.trained
        for sampler in settings.samplers
        for seed in range(settings.seeds)
    ]


def summarise(
    results: Iterable[tuple[Trial, dict[str, Any]]], *, metric: str
) -> list[Outcome]:
    """Returns one outcome for each group of trials, in the order they come.

    Args:
      results: Trials and what ``Comparison.run`` returned.
      metric: Which of the held-out metrics, such as "auc".

    Raises:
      InputError: a run has no such metric.
    """
    groups: dict[tuple[Any, ...], list[tuple[float, dict[str, Any]]]] = {}
    for trial, result in results:
        metrics = result["metrics"]
        for weights, values in {LAST: metrics, **metrics["aggregates"]}.items():
            if values.get(metric) is None:
                # A vote has no probabilities: no log loss, for one.
                if weights != LAST:
                    continue
                raise InputError(
                    f"Expected metric={metric!r} among those of {trial.name}: "
                    f"{', '.join(k for k, v in values.items() if _is_number(v))}."
                )
            key = (trial.sampler, trial.settings.method, trial.epsilon, weights)
            groups.setdefault(key, []).append((values[metric], result["privacy"]))
    return [_outcome(key, found, metric) for key, found in groups.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _outcome(
    key: tuple[Any, ...], found: list[tuple[float, dict[str, Any]]], metric: str
) -> Outcome:
    sampler, method, target, weights = key
    values = [value for value, _ in found]
    privacy = found[0][1] if method != NON_PRIVATE else {}
    return Outcome(
        sampler=sampler,
        method=method,
        weights=weights,
        target_epsilon=target,
        noise_multiplier=privacy.get("noise_multiplier"),
        # Plans of other seeds may differ in a cap: the weakest statement stands.
        epsilon=_largest(found, "epsilon") if privacy else None,
        epsilon_lower_bound=privacy.get("epsilon_lower_bound"),
        metric=metric,
        mean=statistics.fmean(values),
        stddev=statistics.stdev(values) if len(values) > 1 else None,
        num_seeds=len(values),
    )


def _largest(found: list[tuple[float, dict[str, Any]]], name: str) -> float | None:
    values = [privacy.get(name) for _, privacy in found]
    if any(value is None for value in values):
        return None
    return max(value for value in values if value is not None and math.isfinite(value))
