"""Results of ``shift`` as JSON, as a table, as Markdown and as a plot."""

from __future__ import annotations

import pathlib
from typing import Any

from accounting.plots import new_figure
from pipelines.files.json_files import pretty_json
from pipelines.files.storage import write_atomically
from trainer.experiments.drifting_table import shares
from trainer.experiments.shift import NOT_PRIVATE, Course, Shift
from trainer.model.metrics import in_words
from trainer.report import tables
from trainer.report.plots import DASHES, setting_in_words, write_png

TITLE = "A distribution that shifts periodically"
_HEADINGS = ("weights", "mean", "least", "most", "swing", "at the end")


def to_json(found: Shift) -> dict[str, Any]:
    """Returns everything, JSON-serialisable."""
    settings = found.settings
    return {
        "metric": settings.metric,
        "period": settings.period,
        "shift_by": settings.shift_by,
        "num_steps": found.num_steps,
        "seeds": settings.seeds,
        "courses": [course.to_json() for course in found.courses],
        "notes": notes(found),
    }


def notes(found: Shift) -> list[str]:
    """Returns the notes that explain the table."""
    settings = found.settings
    return [
        NOT_PRIVATE,
        f"Held-out {in_words(settings.metric)} in the last of "
        f"{found.num_steps // settings.period} periods of {settings.period} steps, "
        f"mean over {settings.seeds} seeds. In training, small and large values of "
        f"{settings.shift_by} alternate; the held-out examples do not change.",
    ]


def _cells(course: Course) -> list[str]:
    fields = course.to_json()
    names = ("mean", "least", "most", "swing")
    values = [*(fields[f"last_period_{name}"] for name in names), fields["final"]]
    return [course.weights, *(f"{value:.4f}" for value in values)]


def show(found: Shift) -> None:
    """Prints the table and its notes."""
    rows = map(_cells, found.courses)
    tables.show(TITLE, _HEADINGS, rows, left=[0], notes=notes(found))


def write(found: Shift) -> dict[str, Any]:
    """Writes shift.json, shift.md and shift.png; returns the first."""
    out, fields = found.settings.out, to_json(found)
    plot(found, out / "shift.png")
    table = tables.markdown(_HEADINGS, map(_cells, found.courses))
    parts = [f"# {TITLE}", table, *notes(found), f"![{TITLE}](shift.png)", ""]
    write_atomically(out / "shift.md", "\n\n".join(parts).encode())
    write_atomically(out / "shift.json", pretty_json(fields))
    return fields


def plot(found: Shift, path: pathlib.Path) -> None:
    """Draws the metric over the steps and, below it, the share of large values.

    Args:
      found: Results of the experiment.
      path: Path of the PNG.
    """
    settings = found.settings
    figure, axes = new_figure(7.5, 4.4)
    for index, course in enumerate(found.courses):
        axes.plot(
            course.steps, course.mean, label=course.weights, lw=1.5,
            ls=DASHES[index % len(DASHES)],
        )  # fmt: skip
        ends = course.mean - course.stddev, course.mean + course.stddev
        axes.fill_between(course.steps, *ends, alpha=0.15, lw=0)
    axes.set_ylabel(f"held-out {in_words(settings.metric)}")
    axes.set_xlabel("step")
    # The first steps change the metric so much that later changes would be invisible.
    later = [c.mean[c.steps >= settings.period] for c in found.courses]
    least, most = min(map(min, later)), max(map(max, later))
    margin = 0.1 * (most - least) or 0.01
    axes.set_ylim(least - 3 * margin, most + margin)
    axes.grid(alpha=0.3)
    beside = axes.twinx()
    share = shares(found.num_steps, settings.period)
    beside.fill_between(range(found.num_steps), share, color="gray", alpha=0.2, lw=0)
    beside.set_ylim(0, 5)
    beside.set_yticks([0, 1])
    beside.set_ylabel(
        f"share of large {settings.shift_by}", loc="bottom", fontsize="small"
    )
    axes.legend(loc="lower right", fontsize="small", handlelength=4)
    setting = setting_in_words(
        settings.expected_batch_size, found.num_steps, [settings.trained]
    )
    figure.suptitle(f"{TITLE}\n{setting}\n{_over_seeds(found)}", fontsize="medium")
    write_png(figure, path)


def _over_seeds(found: Shift) -> str:
    seeds = found.settings.seeds
    return "1 seed" if seeds == 1 else f"mean and standard deviation over {seeds} seeds"
