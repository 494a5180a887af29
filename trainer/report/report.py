"""The report of an experiment: tables, what explains them, JSON and pictures.

    OUT/STEM.json, .md, .png      what ``write`` makes

The terminal, Markdown and notebooks show the same tables and the same notes.  Every
file is complete or absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from accounting.plots import new_figure
from pipelines.files.storage import pretty_json, write_atomically
from trainer.model.metrics import in_words, metric_names

_WIDEST = 10_000


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int],
) -> None:
    """Prints a table without wrapping its lines.

    Args:
      title: Title of the table.
      headings: Headings of the columns.
      rows: Rows with one text per column.
      left: Indices of left-aligned columns; the others are right-aligned.
    """
    table = Table(
        title=title,
        padding=(0, 1, 0, 0),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for index, heading in enumerate(headings):
        justify = "left" if index in left else "right"
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False)
    # Lines may exceed a narrow terminal: a number that is cut would be wrong.
    wide = Console(width=_WIDEST, markup=False)
    needed = Measurement.get(wide, wide.options, table).maximum
    Console(width=max(console.width, needed), markup=False).print(table)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as Markdown.

    Args:
      headings: Headings of the columns.
      rows: Rows with one text per column.

    Example:
      >>> print(markdown_table(["batches", "noise"], [["poisson", "0.5"]]))
      | batches | noise |
      |---|---|
      | poisson | 0.5 |
    """
    lines = [f"| {' | '.join(row)} |" for row in (headings, *rows)]
    lines.insert(1, "|" + "---|" * len(headings))
    return "\n".join(lines)


#: Dashes of the lines of a plot, which tell them apart without colours.
DASHES = ("-", "--", "-.", ":")
#: Their number is coprime to those of colours and dashes, so that all combine.
MARKERS = "osD^vP*X<>p"


def over_seeds(count: int) -> str:
    """Returns what a picture or a table shows of ``count`` seeds, in words."""
    return "1 seed" if count == 1 else f"mean and standard deviation over {count} seeds"


@contextlib.contextmanager
def drawn(
    path: pathlib.Path, size: tuple[float, float], title: str, *, columns: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its panels to draw in, side by side; writes it whole.

    Args:
      path: Path of the PNG, which is replaced if it exists.
      size: Width and height in inches.
      title: Lines above the panels.
      columns: Number of panels.
    """
    figure, found = new_figure(*size, columns=columns)
    panels = np.atleast_1d(found)
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    yield figure, panels
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def plot_curve(points: list[dict[str, Any]], path: pathlib.Path, *, title: str) -> None:
    """Draws the first two metrics of held-out examples over the steps, side by side.

    Args:
      points: Dicts with ``step`` and metrics.
      path: Path of the PNG.
      title: One line above the plot.
    """
    names = metric_names(points[-1])[:2]
    steps = [point["step"] for point in points]
    size, columns = (4.5 * len(names), 3.6), len(names)
    with drawn(path, size, title, columns=columns) as (_, panels):
        for axes, name in zip(panels, names, strict=True):
            values = [point[name] for point in points]
            known = [value if value is not None else float("nan") for value in values]
            axes.plot(steps, known, color="tab:blue", marker="o", markersize=3)
            axes.set_ylabel(f"{in_words(name)} on held-out examples")
            axes.set_xlabel("step")


Draw = Callable[[pathlib.Path], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table of a report.

    Attributes:
      headings: Headings of the columns.
      rows: Rows with one text per column.
      left: Indices of left-aligned columns.
      title: Title of the table in the terminal.
      notes: Lines that explain the table.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    title: str = ""
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What an experiment found.

    Attributes:
      title: Title of the report.
      tables: Tables of the report, in order.
      fields: All of it, JSON-serialisable.
      above: Lines above the tables.
      notes: Lines below the tables, most important first.
      stem: Name of the report's files, without suffix; empty if none are written.
      draw: Name of a further file -> writes it; Markdown shows those that are PNG.
    """

    title: str
    tables: Sequence[ReportTable]
    fields: Any
    above: Sequence[str] = ()
    notes: Sequence[str] = ()
    stem: str = ""
    draw: Mapping[str, Draw] = dataclasses.field(default_factory=dict)

    def to_json(self) -> Any:
        """Returns ``fields``."""
        return self.fields

    def show(self) -> None:
        """Prints the report."""
        _print(self.above)
        for table in self.tables:
            print_table(
                table.title or self.title, table.headings, table.rows, left=table.left
            )
            _print(table.notes)
        _print(self.notes)

    def markdown(self) -> str:
        """Returns the report as Markdown, without pictures."""
        parts = [f"# {self.title}", *self.above]
        for table in self.tables:
            parts += [markdown_table(table.headings, table.rows), *table.notes]
        return "\n\n".join([*parts, *self.notes]) + "\n"

    def _repr_markdown_(self) -> str:
        """Returns what a notebook shows."""
        return self.markdown()

    def write(self, out: pathlib.Path) -> Any:
        """Writes all files into a folder; returns ``fields``."""
        text = self.markdown()
        for name, draw in self.draw.items():
            draw(out / name)
            if name.endswith(".png"):
                text += f"\n![{self.title}]({name})\n"
        write_atomically(out / f"{self.stem}.md", text.encode())
        write_atomically(out / f"{self.stem}.json", pretty_json(self.fields))
        return self.fields


def _print(lines: Sequence[str]) -> None:
    console = Console()
    for line in lines:
        # Words are wrapped for people alone.
        console.print(
            line, highlight=False, markup=False, soft_wrap=not console.is_terminal
        )
