"""Which methods help, on synthetic clicks: test AUC at epsilon 1, 3 and 10.

    python -m tests.benchmarks.quality --out quality [--rows 500000] [--seeds 3]

Two data sets of one law and different seeds.  On the first, learning rate and clip norm
are chosen for DP-SGD, the learning rate without privacy, and the radius of BAM and of
DP-SAT at the rate and the clip of DP-SGD: a fixed grid, one epsilon, one run a point.
On the second, every method runs with what was chosen, at every epsilon and seed; each
run also gives all averages of its iterates.  Table and plot are in ``OUT/comparison.*``
and the grid in ``OUT/grid.json``.  Stopped, it goes on with the same command.
"""

from __future__ import annotations

import itertools
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from accounting.plan import TRUNCATED_POISSON
from pipelines.batches.manifest import pretty_json, read_manifest, write_atomically
from trainer.cli.compare_commands import write_results
from trainer.experiments import compare_report
from trainer.experiments.compare import Comparison, Outcome, Sampling, Trial, summarise
from trainer.run import privacy
from trainer.settings.method_settings import BAM, DP_SAT, DP_SGD, MODEL_MIX, NON_PRIVATE

EPSILONS = (1.0, 3.0, 10.0)
#: At which the grid is searched.
GRID_EPSILON = 3.0
LEARNING_RATES = (0.03, 0.1, 0.3)
CLIPS = (3.0, 10.0)
METHODS = (NON_PRIVATE, DP_SGD, BAM, DP_SAT)
#: Plain SGD, whose rates are about ten times those of momentum.
MIX_RATES = (0.3, 1.0, 3.0)
MIX_WIDTHS = (0.003, 0.01, 0.03, 0.1)
MIX_FLAGS = ("--optimizer=sgd", "--linf-factor=100")
RADII = {BAM: (0.01, 0.03, 0.1), DP_SAT: (0.03, 0.1, 0.3)}
EPOCHS = 3
#: Steps of an epoch, whatever the number of rows.
EPOCH_STEPS = 195
MODEL = ("--embedding-dim=4", "--hidden=32,16", "--eval-every=100000")
AVERAGES = (
    "--ema-decay=0.98", "--tail=50", "--keep-last=10", "--keep-every=20",
)  # fmt: skip
TITLE = "Synthetic clicks: what each method and average gives"

Flags = tuple[str, ...]


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
        _dpsgd("prepare", f"--input={text}/*", f"--out={data}", "--buckets=1000")
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
        self._say = lambda line: click.echo(f"{folder.name}: {line}", err=True)
        self._comparison = Comparison(folder, data / "test", self._say)
        num_train = rows * 8 // 10
        self._delta = 0.1 / num_train
        sampling = Sampling(
            source=str(data / "train"),
            flags=(
                f"--batch-size={max(1, num_train // EPOCH_STEPS)}",
                f"--epochs={EPOCHS}",
                f"--epsilon={max(EPSILONS)}",
                f"--delta={self._delta!r}",
            ),
        )
        folders = [
            self._comparison.make_batches(sampling, TRUNCATED_POISSON, seed)
            for seed in range(num_batches)
        ]
        plan = read_manifest(folders[0]).plan
        self._noise = {
            epsilon: privacy.noise_multiplier(plan, epsilon=epsilon, delta=self._delta)
            for epsilon in EPSILONS
        }

    def run(
        self,
        method: str,
        epsilon: float | None,
        seed: int,
        flags: Flags,
        *,
        label: str = "",
    ) -> tuple[Trial, dict[str, Any]]:
        """Returns a trial and what its run published."""
        trial = Trial(
            sampler=TRUNCATED_POISSON, method=method, epsilon=epsilon, seed=seed,
            flags=(*MODEL, *self._privacy(method, epsilon), *flags), label=label,
        )  # fmt: skip
        return trial, self._comparison.run(trial)

    def _privacy(self, method: str, epsilon: float | None) -> Flags:
        if epsilon is None:
            return ()
        noise = f"--noise-multiplier={self._noise[epsilon]!r}"
        # ModelMix's noise depends on its settings, and follows from the target.
        target = f"--epsilon={epsilon!r}" if method == MODEL_MIX else noise
        return target, f"--delta={self._delta!r}"


def _grid(method: str, chosen: dict[str, Flags]) -> list[Flags]:
    """Returns the points at which a method is tried."""
    if method == NON_PRIVATE:
        return [(f"--learning-rate={rate}",) for rate in LEARNING_RATES]
    if method == DP_SGD:
        return [
            (f"--learning-rate={rate}", f"--l2-norm-clip={clip}")
            for rate, clip in itertools.product(LEARNING_RATES, CLIPS)
        ]
    if method == MODEL_MIX:
        clip = [f for f in chosen[DP_SGD] if f.startswith("--l2-norm-clip")]
        return [
            (*MIX_FLAGS, *clip, f"--learning-rate={rate}", f"--mix-width={width}")
            for rate, width in itertools.product(MIX_RATES, MIX_WIDTHS)
        ]
    name = {BAM: "bam", DP_SAT: "sat"}[method]
    return [(*chosen[DP_SGD], f"--{name}-radius={r}") for r in RADII[method]]


def _search(
    out: pathlib.Path, rows: int, methods: Flags
) -> tuple[dict[str, Flags], list[Any]]:
    """Returns the best flags of each method, and all points of the grid."""
    chosen: dict[str, Flags] = {}
    points = []
    data = Data(out / "grid", rows, seed=1, num_batches=1)
    for method in methods:
        epsilon = None if method == NON_PRIVATE else GRID_EPSILON
        found = []
        for index, flags in enumerate(_grid(method, chosen)):
            _, result = data.run(method, epsilon, 0, flags, label=f"grid{index}")
            found.append((result["metrics"]["auc"], flags))
            points.append({"method": method, "flags": flags, "auc": found[-1][0]})
        chosen[method] = max(found)[1]
    return chosen, points


def _all_runs(
    out: pathlib.Path, rows: int, seeds: int, chosen: dict[str, Flags]
) -> list[Outcome]:
    data = Data(out / "runs", rows, seed=2, num_batches=seeds)
    results = [
        data.run(method, epsilon, seed, (*chosen[method], *AVERAGES))
        for method in chosen
        for epsilon in ((None,) if method == NON_PRIVATE else EPSILONS)
        for seed in range(seeds)
    ]
    return summarise(results, metric="auc")


@click.command()
@click.option("--out", type=click.Path(path_type=pathlib.Path), required=True)
@click.option("--rows", default=500_000, show_default=True, help="A data set's rows.")
@click.option("--seeds", default=3, show_default=True, help="Repetitions.")
@click.option(
    "--model-mix", is_flag=True, help="Also ModelMix, whose grid has 12 points."
)
def main(out: pathlib.Path, rows: int, seeds: int, model_mix: bool) -> None:
    """Prints the table of all methods and averages, and writes it with its plot."""
    methods = (*METHODS, MODEL_MIX) if model_mix else METHODS
    chosen, points = _search(out, rows, methods)
    write_atomically(out / "grid.json", pretty_json({"points": points}))
    _print_grid(points, chosen)
    outcomes = _all_runs(out, rows, seeds, chosen)
    write_results(out, outcomes, title=TITLE)
    compare_report.show(outcomes, title=TITLE)


def _print_grid(points: Sequence[dict[str, Any]], chosen: dict[str, Flags]) -> None:
    for point in points:
        mark = "*" if point["flags"] == chosen[point["method"]] else " "
        flags = " ".join(point["flags"])
        click.echo(f"{mark} {point['method']:12} {point['auc']:.4f}  {flags}")


if __name__ == "__main__":
    main()
