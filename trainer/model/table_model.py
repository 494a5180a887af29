"""The default model, made from the description of prepared data.

Its inputs are embeddings of ids, mean embeddings of words and lists, numbers as the
schema scales them (without a scale their logarithms), and whether a number is missing.
Fully connected layers and one output per label or class follow.  With finite weights
every column value gives a finite output, also missing, negative and infinite numbers
and ids out of range.

Public: everything but column values.

References:
  Chua et al. (2024), arXiv:2411.04205, section 5: embeddings, log of the integers,
  fully connected layers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError, check_int
from pipelines.core.batches.manifest import Manifest
from pipelines.tables.schema import DATASET_NAME
from trainer.core.tf_compat import keras
from trainer.model.metrics import LABEL

ops = keras.ops

#: Scales the logarithms of counts to the size of the other inputs.
_LOG_SCALE = 0.25
_MOST_FLOAT = float(np.finfo(np.float32).max)

# Roles of a feature, and kinds of labels.
COUNT, NUMBER, ID, IDS = "count", "number", "id", "ids"
BINARY, CLASSES, REGRESSION = "binary", "classes", "regression"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """An input of the default model.  Public.

    Attributes:
      name: Name of the column.
      role: "count" for numbers that enter as logarithms, "number" for numbers that
        enter unchanged, "id" for one embedding each, "ids" for the mean embedding of
        all ids but 0.
      dtype: Dtype of the column.
      shape: Shape of one example.
      sizes: Numbers of ids: one per id of an example for "id", one in all for "ids".
      nullable: Whether NaN marks a missing number; the model has an input for it.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    nullable: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Description of a table for the default model.  Public.

    Attributes:
      features: Inputs of the model.
      task: "binary", "classes" or "regression".
      num_classes: Number of classes, if ``task`` is "classes".
      name: Name of the model.
    """

    features: tuple[Feature, ...]
    task: str = BINARY
    num_classes: int = 2
    name: str = "table"


def table_model(table: Table, *, embedding_dim: int, hidden: Sequence[int]) -> Any:
    """Returns the default model of a table.

    One Embedding layer holds the embeddings of all features, in separate rows: one
    gather instead of many.

    Args:
      table: Features and label.
      embedding_dim: Size of an embedding.
      hidden: Sizes of the fully connected layers.

    Raises:
      InputError: a size is below 1.
    """
    check_int("embedding_dim", embedding_dim, at_least=1)
    for size in hidden:
        check_int("hidden", size, at_least=1)
    named = _free_names([feature.name for feature in table.features])
    inputs = {
        feature.name: keras.Input(feature.shape, dtype=feature.dtype, name=feature.name)
        for feature in table.features
    }
    numbers = [f for f in table.features if f.role in (COUNT, NUMBER)]
    ids = [f for f in table.features if f.role in (ID, IDS)]
    values = [part for f in numbers for part in _encode_numbers(f, inputs[f.name])]
    if ids:
        values += _embed(ids, inputs, embedding_dim, named)
    values = _joined(values, named("features"))
    for index, size in enumerate(hidden):
        layer = keras.layers.Dense(
            size, activation="relu", name=named(f"hidden_{index}")
        )
        values = layer(values)
    # Zero outputs at first: no clipped step is spent on undoing a random start.
    units = table.num_classes if table.task == CLASSES else 1
    head = keras.layers.Dense(units, kernel_initializer="zeros", name=named("logit"))
    return keras.Model(inputs, head(values), name=table.name)


def _free_names(taken: Sequence[str]) -> Callable[[str], str]:
    """Returns a function that makes names of layers differ from names of columns."""

    def free(name: str) -> str:
        while name in taken:
            name += "_"
        return name

    return free


def _joined(parts: list[Any], name: str) -> Any:
    if len(parts) == 1:
        return parts[0]
    return keras.layers.Concatenate(name=name)(parts)


def _encode_numbers(feature: Feature, values: Any) -> list[Any]:
    """Returns numbers (batch, k) and, if nullable, which are missing (batch, k)."""
    if not feature.shape:
        values = values[:, None]
    values = ops.cast(values, "float32")
    missing = ops.isnan(values)
    known = ops.where(missing, 0.0, values)
    known = ops.clip(known, -_MOST_FLOAT, _MOST_FLOAT)
    if feature.role == COUNT:
        # A constant scale, not a statistic of the data: counts of thousands come out
        # near 2, so that no input dominates the clipped norm.
        known = _LOG_SCALE * (ops.sign(known) * ops.log1p(ops.abs(known)))
    if not feature.nullable:
        return [known]
    return [known, ops.cast(missing, "float32")]


def _embed(
    features: Sequence[Feature], inputs: dict[str, Any], dim: int, named: Any
) -> list[Any]:
    """Returns embeddings of ids and mean embeddings of lists, each (batch, k)."""
    columns, last, widths = [], [], []
    for feature in features:
        values = inputs[feature.name]
        columns.append(values if feature.shape else values[:, None])
        widths.append(feature.shape[0] if feature.shape else 1)
        sizes = feature.sizes if feature.role == ID else feature.sizes * widths[-1]
        last.append([size - 1 for size in sizes])
    offsets, total = _offsets(features, last)
    ids = _joined(columns, named("ids"))
    ends = np.array([end for ends in last for end in ends], ids.dtype)
    ids = ops.minimum(ops.maximum(ids, 0), ends)
    table = keras.layers.Embedding(total, dim, name=named("embeddings"))
    rows = table(ids + np.array(offsets, ids.dtype))
    if all(feature.role == ID for feature in features):
        flat = keras.layers.Reshape((sum(widths) * dim,), name=named("embedded"))
        return [flat(rows)]
    places = [
        slice(end - width, end)
        for end, width in zip(itertools.accumulate(widths), widths, strict=True)
    ]
    return [
        _mean_or_all(feature, rows[:, at], ids[:, at], dim)
        for feature, at in zip(features, places, strict=True)
    ]


def _offsets(
    features: Sequence[Feature], last: Sequence[Sequence[int]]
) -> tuple[list[int], int]:
    """Returns the first row of each column of ids, and the number of rows."""
    offsets, total = [], 0
    for feature, ends in zip(features, last, strict=True):
        if feature.role == IDS:
            offsets += [total] * len(ends)
            total += feature.sizes[0]
            continue
        for end in ends:
            offsets.append(total)
            total += end + 1
    return offsets, total


def _mean_or_all(feature: Feature, rows: Any, ids: Any, dim: int) -> Any:
    if feature.role == ID:
        return ops.reshape(rows, (-1, len(feature.sizes) * dim))
    present = ops.cast(ids > 0, "float32")[:, :, None]
    count = ops.maximum(ops.sum(present, 1), 1.0)
    return ops.sum(rows * present, 1) / count


def read_table(manifest: Manifest) -> Table:
    """Returns the table that batches of prepared data describe.

    Raises:
      InputError: the data was not prepared, or its columns differ from the description.
    """
    dataset = manifest.dataset
    try:
        label = dataset["label"] if dataset["name"] == DATASET_NAME else {}
        table = Table(
            features=tuple(map(_feature, dataset["inputs"])),
            task=label["task"],
            num_classes=label["num_classes"],
        )
    except (KeyError, TypeError, AttributeError, IndexError):
        raise InputError(
            "Expected batches of data that `dpsgd prepare` wrote, for the default "
            "model. Prepare the table (`dpsgd schema TABLE` writes a first schema), or "
            "give --model module:function."
        ) from None
    found = {column.name: (column.dtype, column.shape) for column in manifest.columns}
    for feature in table.features:
        if found.get(feature.name) != (feature.dtype, feature.shape):
            raise InputError(
                f"Expected column {feature.name} of type {feature.dtype} and shape "
                f"{feature.shape}. Make the batches from what `dpsgd prepare` wrote."
            )
        for size in feature.sizes:
            check_int("num_buckets", size, at_least=1)
    if LABEL not in found:
        raise InputError(
            f"Expected column {LABEL} in the batches. Make them from what `dpsgd "
            "prepare` wrote."
        )
    return table


def _feature(fields: dict[str, Any]) -> Feature:
    role = NUMBER if fields["role"] == "numbers" else fields["role"]
    return Feature(
        name=fields["name"],
        role=role,
        dtype=fields["dtype"],
        shape=tuple(fields["shape"]),
        sizes=tuple(fields["sizes"]),
        nullable=fields["nullable"],
    )
