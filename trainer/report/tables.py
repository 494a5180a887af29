"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_WIDEST = 10_000


def show(
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


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as Markdown.

    Args:
      headings: Headings of the columns.
      rows: Rows with one text per column.

    Example:
      >>> print(markdown(["batches", "noise"], [["poisson", "0.5"]]))
      | batches | noise |
      |---|---|
      | poisson | 0.5 |
    """
    lines = [f"| {' | '.join(row)} |" for row in (headings, *rows)]
    lines.insert(1, "|" + "---|" * len(headings))
    return "\n".join(lines)
