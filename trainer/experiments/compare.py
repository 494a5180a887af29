"""Many runs that differ in a few things, and what came out: one table.

    OUT/batches/SAMPLER-seed0/            batches, once per sampler and seed
    OUT/runs/NAME-seed0/                  one training run per trial
    OUT/comparison.json, .md, .png        the table, for machines, people and eyes

A trial is a ``dpsgd train`` command: its batches, its flags, its seed.  Every seed has
batches, initial weights and noise of its own.

Formal guarantees:
  - A comparison that was stopped goes on with the same command: finished batches and
    runs are not made again, and an unfinished run continues where it was.
  - A run that is found finished is taken only if it was trained with the flags that the
    trial asks for, by the user's code as it is now.
  - ``summarise`` reports every group of trials, with mean and sample standard deviation
    over its seeds, whatever came out.

Public: what the runs publish.  Choosing among runs on the same data costs privacy that
no statement of a single run covers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from accounting.validation import InputError, check_choice
from pipelines.batches.manifest import (
    MANIFEST_NAME,
    pretty_json,
    read_json,
    write_atomically,
)
from pipelines.inputs.parquet_blocks import list_blocks
from trainer.model.evaluation import check_apart
from trainer.model.metrics import METRICS, name_of
from trainer.model.user_code import load_function
from trainer.run import origin
from trainer.run.run_record import METRICS_NAME, PRIVACY_NAME, RECORD_NAME
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.train_settings import TrainSettings

#: What a trial was asked to do, beside its run.
_FLAGS_SUFFIX = ".flags.json"
#: Of the last weights, beside the names of averages.
LAST = "last"
#: Flags of `dpsgd train` that are set for every trial; a second value would win.
OWN_FLAGS = (
    "--batches", "--eval", "--out", "--method", "--noise-multiplier", "--delta",
    "--init-seed", "--simulates", "--csv", "--tensorboard",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The flags of ``dpsgd batches`` that all trials share.

    Attributes:
      source: ``--input``.
      flags: All others but ``--sampler`` and ``--out``.
    """

    source: str
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a comparison.

    Attributes:
      sampler: How its batches were made.
      method: ``--method``.
      epsilon: The target that its noise was chosen for; None without privacy.
      seed: Which repetition.
      flags: All flags of ``dpsgd train`` but the folders, the method and the seed.
      label: Tells apart trials that differ in their flags alone.
    """

    sampler: str
    method: str
    epsilon: float | None
    seed: int
    flags: tuple[str, ...]
    label: str = ""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        target = "" if self.epsilon is None else f"-eps{self.epsilon:g}"
        label = f"-{self.label}" if self.label else ""
        return f"{self.sampler}-{self.method}{target}-seed{self.seed}{label}"


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
      out: New, or of the same comparison.
      held_out: Folder of held-out examples.
      say: Takes a line of progress.
    """

    def __init__(
        self, out: pathlib.Path, held_out: pathlib.Path, say: Callable[[str], None]
    ) -> None:
        self._out, self._held_out, self._say = out, held_out, say

    def make_batches(self, sampling: Sampling, sampler: str, seed: int) -> pathlib.Path:
        """Returns the folder of the batches of one sampler and seed.

        Raises:
          InputError: `dpsgd batches` failed, its own message is on the terminal; or the
            held-out examples are what is sampled.
        """
        folder = self._batches(sampler, seed)
        if (folder / MANIFEST_NAME).exists():
            return folder
        # Training would refuse them, once the batches are made.
        check_apart(self._held_out, list_blocks(sampling.source).footers.values())
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._say(f"batches: {sampler}, seed {seed}")
        command = [
            sys.executable, "-m", "dpsgd", "batches", f"--input={sampling.source}",
            f"--sampler={sampler}", *sampling.flags, f"--out={folder}",
        ]  # fmt: skip
        # A process of its own: Beam and TensorFlow need not know each other.
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise InputError(
                f"Expected dpsgd batches --sampler {sampler} to succeed; its exit "
                f"status is {done.returncode}. Its own message is above."
            )
        return folder

    def _batches(self, sampler: str, seed: int) -> pathlib.Path:
        return self._out / "batches" / f"{sampler}-seed{seed}"

    def run(self, trial: Trial) -> dict[str, Any]:
        """Trains a trial, unless it is done, and returns what its run published.

        Raises:
          InputError: refused by `dpsgd train`, or done with other flags.
        """
        run = self._out / "runs" / trial.name
        arguments = [
            f"--batches={self._batches(trial.sampler, trial.seed)}",
            f"--eval={self._held_out}", f"--out={run}", f"--method={trial.method}",
            f"--init-seed={trial.seed}", *trial.flags,
        ]  # fmt: skip
        self._check_flags(run, arguments)
        if _is_finished(run):
            _check_code(run)
        else:
            self._say(f"training: {trial.name}")
            _train(arguments)
        return {
            name: json.loads((run / file).read_bytes())
            for name, file in (("metrics", METRICS_NAME), ("privacy", PRIVACY_NAME))
        }

    def _check_flags(self, run: pathlib.Path, arguments: Sequence[str]) -> None:
        path = run.with_name(run.name + _FLAGS_SUFFIX)
        if path.exists() and read_json(path) != list(arguments):
            raise InputError(
                f"Expected {run} to be of the flags that are asked for now; "
                f"{path.name} beside it says otherwise. Give the same command, or "
                "another --out."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, pretty_json(list(arguments)))


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


def check_train_flags(
    arguments: Sequence[str],
    rest: Sequence[str],
    *,
    metric: str,
    own: Sequence[str] = OWN_FLAGS,
) -> TrainSettings:
    """Returns the settings of `dpsgd train`, before any batches are made.

    Args:
      arguments: What is set for a trial, its folders but for the batches included.
      rest: What the user adds.
      metric: What the runs are judged by.
      own: Flags that are set for every trial.

    Raises:
      InputError: a flag of ``own`` in ``rest``, what `train` would refuse before it
        reads a file, a metric that the runs will not have, or no held-out folder.
    """
    from trainer.cli.commands import train_request

    for flag in rest:
        if flag.split("=")[0] in own:
            raise InputError(
                f"Expected no {flag} for `dpsgd train`: it is set for every run. Leave "
                "it out."
            )
    request = train_request(["--batches=.", *arguments, *rest])
    settings: TrainSettings = request.settings
    check_choice("metric", metric, _metrics(settings))
    if not request.held_out.is_dir():
        raise InputError(
            f"Expected --eval {request.held_out} to be a folder. Give one that `dpsgd "
            "prepare` wrote."
        )
    return settings


def _metrics(settings: TrainSettings) -> tuple[str, ...]:
    """Returns the names of the metrics that a run will have."""
    known = METRICS[settings.task]
    if settings.metric is None:
        return known
    # What a metric of the user's own is called is known when it is loaded.
    return (*known, name_of(load_function(settings.metric, "metric")))


def _train(arguments: Sequence[str]) -> None:
    # Imported here: it loads TensorFlow.
    from trainer.cli.commands import train_request
    from trainer.train import train

    train(train_request(arguments))


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
            key = (trial.sampler, trial.method, trial.epsilon, weights)
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
