"""The report of an experiment: tables, what explains them, JSON and pictures.

    OUT/STEM.json, .md, .png      what ``write`` makes

Formal guarantees:
  - The terminal, Markdown and notebooks show the same tables and the same notes.
  - Every file is complete or absent.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from pipelines.files.json_files import pretty_json
from pipelines.files.storage import write_atomically
from trainer.report import tables

Draw = Callable[[pathlib.Path], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a report.

    Attributes:
      headings: Headings of the columns.
      rows: Rows with one text per column.
      left: Indices of left-aligned columns.
      title: Its title in the terminal.
      notes: What explains it, as lines.
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
      tables: Its tables, in order.
      fields: All of it, JSON-serialisable.
      above: Lines above the tables.
      notes: Lines below the tables, most important first.
      stem: Name of its files, without suffix; empty if it is not written.
      draw: Name of a further file -> writes it; Markdown shows those that are PNG.
    """

    title: str
    tables: Sequence[Table]
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
            tables.show(
                table.title or self.title, table.headings, table.rows, left=table.left
            )
            _print(table.notes)
        _print(self.notes)

    def markdown(self) -> str:
        """Returns the report as Markdown, without pictures."""
        parts = [f"# {self.title}", *self.above]
        for table in self.tables:
            parts += [tables.markdown(table.headings, table.rows), *table.notes]
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
