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
    notes: Iterable[str] = (),
) -> None:
    """Prints a table that no line of is wrapped, and notes below it.

    Args:
      title: Above the table.
      headings: Of the columns.
      rows: A text for each column.
      left: Columns whose texts begin at the left; those of others end at the right.
      notes: Lines, wrapped as the terminal wants them.
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
    console = Console()
    # On a narrow terminal lines are too long: a number that is cut is another number.
    wide = Console(width=_WIDEST)
    needed = Measurement.get(wide, wide.options, table).maximum
    Console(width=max(console.width, needed)).print(table)
    for note in notes:
        console.print(note, highlight=False)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as Markdown.

    Args:
      headings: Of the columns.
      rows: A text for each column.

    Example:
      >>> print(markdown(["batches", "noise"], [["poisson", "0.5"]]))
      | batches | noise |
      |---|---|
      | poisson | 0.5 |
    """
    lines = [f"| {' | '.join(row)} |" for row in (headings, *rows)]
    lines.insert(1, "|" + "---|" * len(headings))
    return "\n".join(lines)
