"""Results of ``variance`` as JSON, as a table, as Markdown and as a plot."""

from __future__ import annotations

import functools
import io
import math
import pathlib
import statistics
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from matplotlib import ticker

from accounting.plots import new_figure
from pipelines.files.storage import write_atomically
from trainer.model.metrics import in_words
from trainer.papers.variance import FACTOR, Spread, Variances
from trainer.report.arrow_tables import as_table
from trainer.report.plots import setting_in_words, write_png
from trainer.report.report import Report, Table

TITLE = "Iterates of one run against independent runs"
_HEADINGS = (
    "output", "over runs", "of iterates", "variance ratio", f"within x{FACTOR:g}",
    "if exact",
)  # fmt: skip
#: Maximum number of points in the plot; more would hide each other.
_POINTS = 4000


def report(found: Variances) -> Report:
    """Returns the report of an experiment."""
    table = Table(headings=_HEADINGS, rows=list(map(_cells, found.spreads)))
    return Report(
        stem="variance",
        title=TITLE,
        tables=[table],
        notes=notes(found),
        fields=_fields(found),
        draw={
            "variance.parquet": functools.partial(_write_examples, found),
            "variance.png": functools.partial(plot, found),
        },
    )


def _fields(found: Variances) -> dict[str, Any]:
    of_all = found.epsilon_of_all
    return {
        "num_runs": found.settings.seeds,
        "num_iterates": found.spreads[0].num_iterates,
        "metric": found.settings.metric,
        "values": list(found.metrics),
        "outputs": [one.to_json() for one in found.spreads],
        "privacy_of_one_run": found.privacy,
        "epsilon_of_all_runs": of_all and of_all[0],
        "delta_of_all_runs": of_all and of_all[1],
        "notes": notes(found),
    }


def notes(found: Variances) -> list[str]:
    """Returns the notes that explain the table."""
    runs, iterates = found.settings.seeds, found.spreads[0].num_iterates
    return [
        f"Over runs: standard deviation of the last weights' predictions over {runs} "
        f"independent runs, mean over {len(found.spreads[0].over_runs):,} held-out "
        f"examples. Of iterates: standard deviation over {iterates} kept iterates of "
        "one run, mean over examples and runs. Variance ratio: mean variance of "
        "iterates over mean variance of runs; mean and range over runs. Within "
        f"x{FACTOR:g}: share of examples whose two standard deviations are within this "
        "factor, and the share expected if both estimated one variance.",
        "All runs start from the same weights and use the same examples: only noise "
        "and sampling differ.",
        _metric_note(found),
        _privacy_note(found),
    ]


def _metric_note(found: Variances) -> str:
    values, name = found.metrics, in_words(found.settings.metric)
    spread = statistics.stdev(values)
    return (
        f"Held-out {name} of the last weights over runs: mean "
        f"{statistics.fmean(values):.4f}, standard deviation {spread:.4f}."
    )


def _privacy_note(found: Variances) -> str:
    of_all, runs = found.epsilon_of_all, found.settings.seeds
    cost = "none is stated for one run"
    if of_all is not None:
        epsilon, delta = math.ceil(of_all[0] * 100) / 100, of_all[1]
        cost = f"together {epsilon:g} at delta {delta:.2g}, by basic composition"
    return (
        f"Each of the {runs} runs is a release and costs its own epsilon: {cost}. The "
        "iterates of a run cost nothing in addition. Held-out examples are not "
        "protected."
    )


def _cells(one: Spread) -> list[str]:
    ratios = one.variance_ratios
    return [
        one.output,
        f"{one.over_runs.mean():.4g}",
        f"{one.of_iterates.mean():.4g}",
        f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{100 * one.share_within:.0f} %",
        f"{100 * one.expected_share:.0f} %",
    ]


def _write_examples(found: Variances, path: pathlib.Path) -> None:
    """Writes one row per held-out example, in their order."""
    columns = {}
    for one in found.spreads:
        prefix = f"{one.output}_" if len(found.spreads) > 1 else ""
        columns[f"{prefix}stddev_over_runs"] = one.over_runs
        for run, values in enumerate(one.of_iterates):
            columns[f"{prefix}stddev_of_iterates_{run}"] = values
    buffer = io.BytesIO()
    pq.write_table(as_table(columns), buffer)
    write_atomically(path, buffer.getvalue())


def plot(found: Variances, path: pathlib.Path) -> None:
    """Plots S against s for each output, one point per example.

    The line marks equality, the band a factor of ``FACTOR``.  The iterates are those of
    the first run, since a user would have one run.

    Args:
      found: Results of the experiment.
      path: Path of the PNG.
    """
    columns = len(found.spreads)
    figure, panels = new_figure(4.8 * columns, 4.4, columns=columns)
    for axes, one in zip(np.atleast_1d(panels), found.spreads, strict=True):
        _draw(axes, one)
    figure.suptitle(_title(found), fontsize="medium")
    write_png(figure, path)


def _title(found: Variances) -> str:
    settings = found.settings
    setting = setting_in_words(
        settings.batches.expected_batch_size, found.num_steps, [settings.trained]
    ).replace("steps, ", "steps\n")
    iterates = found.spreads[0].num_iterates
    return f"{iterates} iterates of one run, {settings.seeds} runs\n{setting}"


def _draw(axes: Any, one: Spread) -> None:
    over_runs, of_iterates = one.over_runs.ravel(), one.of_iterates[0].ravel()
    known = (over_runs > 0) & (of_iterates > 0)
    x, y = over_runs[known], of_iterates[known]
    # Evenly spaced, so that all of the held-out examples is shown.
    chosen = np.linspace(0, len(x) - 1, min(len(x), _POINTS)).astype(int)
    axes.loglog(x[chosen], y[chosen], ".", ms=3, alpha=0.4, color="C0")
    ends = np.array([min(x.min(), y.min()), max(x.max(), y.max())])
    axes.plot(ends, ends, color="black", lw=1, label="equal")
    axes.fill_between(
        ends, ends / FACTOR, ends * FACTOR, color="C1", alpha=0.2, lw=0,
        label=f"factor {FACTOR:g}",
    )  # fmt: skip
    axes.set_xlabel("standard deviation over runs")
    axes.set_ylabel("of the iterates of one run")
    axes.set_title(one.output, fontsize="medium")
    subs = (1.0, 2.0, 5.0) if ends[1] < 50 * ends[0] else (1.0,)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=7))
        axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
