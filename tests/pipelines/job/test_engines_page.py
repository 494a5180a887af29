"""The sizes in docs/engines.md are those of ``dpsgd batches --dry-run``."""

from __future__ import annotations

import pathlib
import re

import pytest

from accounting.plan import DpSgdPlan
from pipelines.batches.columns import Column
from pipelines.inputs.parquet_blocks import Block, Dataset
from pipelines.job.packing import group_bytes
from pipelines.job.sizing import estimate, make_layout

#: Prepared Criteo: a label, 13 integers and 26 categories.
COLUMNS = (
    Column(name="label", dtype="int8"),
    Column(name="integers", dtype="float32", shape=(13,)),
    Column(name="categories", dtype="int32", shape=(26,)),
)


def row(root: pathlib.Path, name: str, column: int) -> list[float]:
    """The numbers of a cell of the table, each after the calculation before it."""
    text = (root / "docs" / "engines.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    cell = line.split("|")[2 + column].split("=")[-1]
    return [float(n.replace(",", "")) for n in re.findall(r"[\d,]*\d(?:\.\d+)?", cell)]


@pytest.mark.parametrize(("column", "rows"), [(0, 46_000_000), (1, 4_000_000_000)])
def test_the_sizes_of_the_page_are_those_of_the_job(
    root: pathlib.Path, column: int, rows: int
) -> None:
    (num_steps,) = map(int, row(root, "steps |", column))
    plan = DpSgdPlan(
        sampler="poisson", num_examples=rows, expected_batch_size=65536,
        num_steps=num_steps,
    )  # fmt: skip
    block = Block(
        path="a", name="a", row_group=0, num_rows=rows, first_row=0, ordinal=0
    )
    dataset = Dataset(
        columns=COLUMNS, blocks=(block,), description={}, files={}, hidden=(),
        footers={},
    )  # fmt: skip
    layout = make_layout(plan, dataset)
    assert num_steps == -(-rows // 65536)
    told = row(root, "steps per file, files", column)
    assert told[-2:] == [layout.steps_per_group, layout.num_groups]
    assert row(root, "group |", column)[0] == round(group_bytes(layout) / 1e6)
    shuffle = row(root, "shuffle |", column)[0]
    assert shuffle == pytest.approx(estimate(layout).shuffle_bytes / 1e9, rel=0.01)
