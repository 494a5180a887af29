"""Large files of a table, divided into parts by the workers of an engine.

Formal guarantees:
  - Parts, in order, have the rows of the files, and each begins with a row.
  - A range of text is scanned once, also by a job that was killed and resumed.

Public: everything here.  Sensitive: the text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib

from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.storage import write_atomically
from pipelines.job.runtime.tasks import Step
from pipelines.tables.convert import ConvertOptions
from pipelines.tables.file_parts import join_rows
from pipelines.tables.raw_files import InputFile

#: Name of the step.
DIVIDE = "divide"
#: Folder of the states of ranges, in the folder of the unfinished job.
DIVIDED = "divided"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """How large files become parts.  Public.

    Attributes:
      ranges: Ranges of the files, in order; those of text may begin in a quotation.
      options: How rows become files.
      work: Folder for the states.
    """

    ranges: tuple[InputFile, ...]
    options: ConvertOptions
    work: str

    def path(self, index: int) -> pathlib.Path:
        """Path of the states after a range."""
        return pathlib.Path(self.work, DIVIDED, f"{index:07d}.json")

    def look(self, index: int) -> None:
        """Writes the states after a range."""
        part = self.ranges[index]
        found = self.options.open([part]).leaves_open(part)
        write_atomically(self.path(index), pretty_json(found), mode=0o600)

    @property
    def step(self) -> Step:
        """The step that scans the ranges."""
        return Step(
            name=DIVIDE,
            task=self.look,
            items=self.unknown,
            output=self.path,
            size=lambda index: self.ranges[index].num_bytes,
        )

    @functools.cached_property
    def unknown(self) -> list[int]:
        """Indices of the ranges to scan."""
        parts = [i for i, each in enumerate(self.ranges) if each.part]
        if not parts or self.options.open([self.ranges[parts[0]]]).lines_are_rows:
            return []
        return parts

    def parts(self) -> tuple[InputFile, ...]:
        """Returns parts that begin with rows."""
        if not self.unknown:
            return self.ranges
        parts: list[InputFile] = []
        for _, of_file in itertools.groupby(
            enumerate(self.ranges), lambda each: each[1].path
        ):
            indices, ranges = zip(*of_file, strict=True)
            if len(ranges) == 1:
                parts += ranges
                continue
            after = [tuple(read_json(self.path(index))) for index in indices]
            parts += join_rows(ranges, after)
        return tuple(parts)
