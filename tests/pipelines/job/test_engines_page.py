"""The sizes in docs/engines.md are those of ``dpsgd batches --dry-run``."""

from __future__ import annotations

import pathlib
import re

import pytest

from accounting.core.plan import DpSgdPlan
from pipelines.core.batches.columns import Column
from pipelines.inputs.parquet_blocks import Block, Dataset
from pipelines.job.fan_in import choose_fan_in, traffic
from pipelines.job.packing import Layout, group_bytes
from pipelines.job.sizing import estimate, make_layout, worker_bytes

#: Prepared Criteo: a label, 13 integers and 26 categories.
COLUMNS = (
    Column(name="label", dtype="int8"),
    Column(name="integers", dtype="float32", shape=(13,)),
    Column(name="categories", dtype="int32", shape=(26,)),
)


def large(rows: int, row_group: int, epochs: int = 1) -> tuple[Layout, Dataset]:
    """Prepared Criteo, in batches of 65,536."""
    num_steps = epochs * -(-rows // 65_536)
    plan = DpSgdPlan(
        sampler="poisson", num_examples=rows, expected_batch_size=65_536,
        num_steps=num_steps,
    )  # fmt: skip
    blocks = tuple(
        Block(path="a", name="a", row_group=number, num_rows=row_group,
              first_row=number * row_group, ordinal=number)
        for number in range(-(-rows // row_group))
    )  # fmt: skip
    dataset = Dataset(
        columns=COLUMNS, blocks=blocks, description={}, files={}, hidden=(), footers={}
    )
    return make_layout(plan, dataset), dataset


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
    layout, _ = large(rows, 131_072)
    assert num_steps == layout.plan.num_steps == -(-rows // 65536)
    told = row(root, "steps per file, files", column)
    assert told[-2:] == [layout.steps_per_group, layout.num_groups]
    assert row(root, "group |", column)[0] == round(group_bytes(layout) / 1e6)
    shuffle = row(root, "shuffle |", column)[0]
    assert shuffle == pytest.approx(estimate(layout).shuffle_bytes / 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("column", "rows", "row_group", "epochs"),
    [
        (0, 46_000_000, 131_072, 1),
        (1, 4_000_000_000, 131_072, 1),
        (2, 4_000_000_000, 32_768, 100),
    ],
)
def test_the_requests_of_the_page_are_those_of_the_job(
    root: pathlib.Path, column: int, rows: int, row_group: int, epochs: int
) -> None:
    layout, dataset = large(rows, row_group, epochs)
    num_blocks, chosen = len(dataset.blocks), choose_fan_in(layout, dataset)
    asked = traffic(layout, num_blocks, chosen)
    assert row(root, "row groups", column) == [num_blocks, row_group]
    assert row(root, "files of the map", column) == [chosen.num_files(num_blocks)]
    two_passes = chosen.files_per_merge > 0
    merged = chosen.num_parts(layout) * chosen.num_merges(num_blocks)
    assert row(root, "files of the second", column) == [merged] * two_passes
    assert row(root, "requests", column) == [asked.shuffle_reads]
    assert row(root, "bytes of each", column) == [round(asked.bytes_per_read / 1e3)]
    (stored,) = row(root, "stored", column)
    assert stored == pytest.approx(asked.stored_bytes / 1e9, rel=0.01)
    needed = worker_bytes(layout, dataset, fan_in=chosen)
    assert row(root, "memory of", column) == [round(needed / 1e9, 2)]
