"""The data sets of a comparison: the given one, or one for each way to bound users.

    OUT/tables/rows-k5/, users-k5/        the bounded table, which all seeds share

At one k, rows and users are sampled with the same probability in the same number of
steps.  Both then use the kept rows equally often, and compute about as many gradients.

Formal guarantees:
  - Nothing is made before the table, its columns and every sampler are checked; text,
    whose columns have no types, is refused.
  - A bounded table is made once; one that was stopped is continued, and one that is of
    another k, column or number of slots is refused.

Public: settings.  Sensitive: tables.
"""

from __future__ import annotations

import dataclasses
import pathlib

import pyarrow as pa

from accounting.core.plan import TRUNCATED_POISSON
from accounting.core.validation import InputError
from pipelines.core.users.bounded import USERS, Bounded, UserBound
from pipelines.inputs.parquet_blocks import (
    description_of,
    list_blocks,
    numeric_columns,
)
from pipelines.job.batch_settings import BatchSettings
from pipelines.users.bound import bound
from pipelines.users.bound_folder import check_table
from pipelines.users.bound_job import BoundSettings
from trainer.experiments.comparison.runs import Say, training_data
from trainer.model.evaluation import check_files
from trainer.settings.comparison_settings import ComparisonSettings, Level, UserLevels


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set, and the comparison on it.

    Attributes:
      settings: Settings with the source and the batches of this data set.
      num_examples: Number of slots.
      bounded: How its users are bounded, a `Level` if the comparison varies it; None
        if the unit is an example.
    """

    settings: ComparisonSettings
    num_examples: int
    bounded: UserBound | None


def find_data_sets(settings: ComparisonSettings) -> list[DataSet]:
    """Returns the data sets; tables of bounded users need not exist yet.

    Raises:
      InputError: a table or a sampler cannot be used.
    """
    if settings.users is not None:
        return _data_sets_of_users(settings, settings.users)
    dataset = training_data(settings)
    bounded, number = dataset.bounded, dataset.num_examples
    return [DataSet(settings=settings, num_examples=number, bounded=bounded)]


def _data_sets_of_users(
    settings: ComparisonSettings, users: UserLevels
) -> list[DataSet]:
    most = max(users.max_examples_per_user) if USERS in users.sampled else 1
    groups = check_table(settings.source, users.user_column, most)
    check_files(
        settings.held_out,
        numeric_columns(_without(groups.schema, users.user_column)),
        description_of(groups.schema, settings.source),
        groups.footers.values(),
    )
    num_rows = sum(groups.files.values())
    data_sets = [
        _data_set(
            settings, level, dataclasses.replace(batches, expected_batch_size=size)
        )
        for batches in settings.batches
        for level, size in users.levels(num_rows, batches.expected_batch_size)
    ]
    for data in data_sets:
        _check_samplers(data)
    return data_sets


def _without(schema: pa.Schema, column: str) -> pa.Schema:
    return schema.remove(schema.get_field_index(column))


def _data_set(
    settings: ComparisonSettings, level: Level, batches: BatchSettings
) -> DataSet:
    source = str(settings.out / "tables" / level.name)
    return DataSet(
        settings=dataclasses.replace(settings, batches=(batches,), source=source),
        num_examples=level.num_examples,
        bounded=level,
    )


def _check_samplers(data: DataSet) -> None:
    """Refuses samplers that `dpsgd batches` refuses for bounded tables."""
    for sampler in data.settings.samplers:
        for batches in data.settings.batches_of(sampler):
            plan = batches.plan(data.num_examples)
            if plan.largest_batch_size is not None and not plan.truncated_batch_size:
                raise InputError(
                    f"Expected sampler={sampler!r} to draw each example independently: "
                    "it assigns steps to a public number of slots, and which slots "
                    f"have rows depends on the users. Give --sampler "
                    f"{TRUNCATED_POISSON}."
                )


def make_table(settings: ComparisonSettings, data: DataSet, say: Say) -> None:
    """Bounds the users of a table, unless that is done.

    Args:
      settings: Settings of the comparison, with the whole table.
      data: The data set to make.
      say: Called with each line of progress.

    Raises:
      InputError: the table is refused, or the folder holds another one.
    """
    level, folder = data.bounded, pathlib.Path(data.settings.source)
    if not isinstance(level, Level):
        return
    names = [field.name for field in dataclasses.fields(UserBound)]
    asked = {name: getattr(level, name) for name in names}
    if not folder.exists():
        say(f"bounding users: {level.name}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        bound(settings.source, folder, BoundSettings(**asked))
    note = list_blocks(str(folder)).bounded
    if note is None or note != Bounded(**asked, key=note.key):
        raise InputError(
            f"Expected the table in {folder} to be bounded as requested; it has "
            "other settings. Give the same command, or another --out."
        )
