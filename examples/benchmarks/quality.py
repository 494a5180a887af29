"""Which methods help, on synthetic clicks: test AUC at epsilon 1, 3 and 10.

    python -m examples.benchmarks.quality --out quality [--rows 500000] [--seeds 3]

Two data sets of one law and different seeds.  On the first, learning rate and clip norm
are chosen for DP-SGD, the learning rate without privacy, and the radius of BAM and of
DP-SAT at the rate and the clip of DP-SGD: a fixed grid, one epsilon, one run a point.
On the second, every method runs with what was chosen, at every epsilon and seed; each
run also gives all averages of its iterates.  Table and plot are in ``OUT/comparison.*``
and the grid in ``OUT/grid.json``.  Stopped, it goes on with the same command.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import cyclopts

from pipelines.files.storage import pretty_json
from pipelines.files.storage import write_atomically
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.flat_settings import train_settings
from trainer.experiments.compare import Comparison, report, summarise
from trainer.experiments.comparison_runs import ComparisonCase, Runs
from trainer.run import privacy
from trainer.settings.methods import DP_SGD, NON_PRIVATE
from trainer.settings.requests import Experiment
from trainer.settings.train_settings import TrainSettings

#: Of ``TrainSettings``, by name.
Fields = dict[str, Any]

EPSILONS = (1.0, 3.0, 10.0)
#: At which the grid is searched.
GRID_EPSILON = 3.0
LEARNING_RATES = (0.03, 0.1, 0.3)
CLIPS = (3.0, 10.0)
BAM, DP_SAT, MODEL_MIX = "bam", "dp-sat", "model-mix"
METHODS = (NON_PRIVATE, DP_SGD, BAM, DP_SAT)
#: Plain SGD, whose rates are about ten times those of momentum.
MIX_RATES = (0.3, 1.0, 3.0)
MIX_WIDTHS = (0.003, 0.01, 0.03, 0.1)
MIX: Fields = {"method": MODEL_MIX, "optimizer": "sgd", "linf_factor": 100}
RADII = {BAM: (0.01, 0.03, 0.1), DP_SAT: (0.03, 0.1, 0.3)}
EPOCHS = 3
#: Steps of an epoch, whatever the number of rows.
EPOCH_STEPS = 195
MODEL: Fields = {"embedding_dim": 4, "hidden": (32, 16), "eval_every": 100_000}
#: The published tables were made with it.
OPTIMIZER: Fields = {"optimizer": "momentum"}
AVERAGES: Fields = {"ema_decay": 0.98, "tail": 50, "keep_last": 10, "keep_every": 20}


def _dpsgd(*arguments: str) -> None:
    command = [sys.executable, "-m", "dpsgd", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _make_data(folder: pathlib.Path, rows: int, seed: int) -> pathlib.Path:
    """Returns a folder with the splits ``train`` and ``test``."""
    data = folder / "data"
    if not data.exists():
        text = folder / "text"
        if not text.exists():
            _dpsgd("synth", f"--rows={rows}", f"--seed={seed}", f"--out={text}")
        _dpsgd("prepare", f"--input={text}", f"--out={data}", "--schema=criteo")
    return data


class Data:
    """One data set, its batches, and runs on them.

    Args:
      folder: Of everything.
      rows: Training and test rows together.
      seed: Of the rows.
      num_batches: Sets of batches to make.
    """

    def __init__(
        self, folder: pathlib.Path, rows: int, seed: int, num_batches: int
    ) -> None:
        data = _make_data(folder, rows, seed)
        self._say = lambda line: print(f"{folder.name}: {line}", file=sys.stderr)
        experiment = Experiment(
            source=str(data / "train"), held_out=data / "test", out=folder
        )
        self._runs = Runs(experiment, self._say)
        num_train = rows * 8 // 10
        self._delta = 0.1 / num_train
        self._sampling = BatchSettings(
            expected_batch_size=max(1, num_train // EPOCH_STEPS),
            num_epochs=EPOCHS,
            epsilon=max(EPSILONS),
            delta=self._delta,
        )
        plan = self._sampling.plan(list_blocks(experiment.source).num_examples)
        case = ComparisonCase(
            batches=self._sampling, settings=TrainSettings(method=NON_PRIVATE)
        )
        for seed in range(num_batches):
            name = case.name_of_batches(seed)
            self._runs.make_batches(name, self._sampling, plan)
        self._plan = plan

    def run(
        self, epsilon: float | None, seed: int, fields: Fields
    ) -> tuple[ComparisonCase, dict[str, Any]]:
        """Returns a case and what one of its runs published."""
        settings = train_settings(
            **{**MODEL, **OPTIMIZER, **fields, **self._target(epsilon)}
        )
        if epsilon is not None:
            noise = privacy.noise_bounds(
                self._plan,
                epsilon=epsilon,
                delta=self._delta,
                theorem=privacy.theorem_of_settings(settings),
            ).guarantee
            settings = dataclasses.replace(
                settings, target_epsilon=None, noise_multiplier=noise
            )
        case = ComparisonCase(
            batches=self._sampling,
            settings=settings,
            target_epsilon=epsilon,
        )
        return case, self._runs.run(case.trial(seed))

    def _target(self, epsilon: float | None) -> Fields:
        if epsilon is None:
            return {}
        return {"target_epsilon": epsilon, "target_delta": self._delta}


def _grid(method: str, chosen: dict[str, Fields]) -> list[Fields]:
    """Returns the points at which a method is tried."""
    if method == NON_PRIVATE:
        return [{"method": method, "learning_rate": rate} for rate in LEARNING_RATES]
    if method == DP_SGD:
        return [
            {"method": method, "learning_rate": rate, "l2_norm_clip": clip}
            for rate, clip in itertools.product(LEARNING_RATES, CLIPS)
        ]
    if method == MODEL_MIX:
        clip = chosen[DP_SGD]["l2_norm_clip"]
        return [
            {**MIX, "l2_norm_clip": clip, "learning_rate": rate, "mix_width": width}
            for rate, width in itertools.product(MIX_RATES, MIX_WIDTHS)
        ]
    name = {BAM: "bam_radius", DP_SAT: "sat_radius"}[method]
    return [{**chosen[DP_SGD], "method": method, name: r} for r in RADII[method]]


def _search(
    out: pathlib.Path, rows: int, methods: Sequence[str]
) -> tuple[dict[str, Fields], list[Any]]:
    """Returns the best settings of each method, and all points of the grid."""
    chosen: dict[str, Fields] = {}
    points = []
    data = Data(out / "grid", rows, seed=1, num_batches=1)
    for method in methods:
        epsilon = None if method == NON_PRIVATE else GRID_EPSILON
        found = []
        for fields in _grid(method, chosen):
            _, result = data.run(epsilon, 0, fields)
            found.append({"settings": fields, "auc": result["metrics"]["auc"]})
        points += found
        chosen[method] = max(found, key=lambda point: point["auc"])["settings"]
    return chosen, points


def _all_runs(
    out: pathlib.Path, rows: int, seeds: int, chosen: dict[str, Fields]
) -> Comparison:
    data = Data(out / "runs", rows, seed=2, num_batches=seeds)
    results = [
        data.run(epsilon, seed, {**chosen[method], **AVERAGES})
        for method in chosen
        for epsilon in ((None,) if method == NON_PRIVATE else EPSILONS)
        for seed in range(seeds)
    ]
    return report(summarise(results, metric="auc"))


def main(
    *, out: pathlib.Path, rows: int = 500_000, seeds: int = 3, model_mix: bool = False
) -> None:
    """Prints the table of all methods and averages, and writes it with its plot.

    Args:
      out: New folder, or that of a stopped run.
      rows: Rows of a data set.
      seeds: Repetitions.
      model_mix: Also ModelMix, whose grid has 12 points.
    """
    methods = (*METHODS, MODEL_MIX) if model_mix else METHODS
    chosen, points = _search(out, rows, methods)
    write_atomically(out / "grid.json", pretty_json({"points": points}))
    _print_grid(points, chosen)
    found = _all_runs(out, rows, seeds, chosen)
    found.write(out)
    found.show()


def _print_grid(points: Sequence[dict[str, Any]], chosen: dict[str, Fields]) -> None:
    for point in points:
        settings = point["settings"]
        mark = "*" if settings in chosen.values() else " "
        text = " ".join(f"{name}={value}" for name, value in settings.items())
        print(f"{mark} {point['auc']:.4f}  {text}")


if __name__ == "__main__":
    cyclopts.run(main)
