"""The kind of column that a schema gives to an Arrow type, from the type alone."""

from __future__ import annotations

import pyarrow as pa

DROP = "drop"


def kind_of_type(kind: pa.DataType) -> str:
    """Returns "numeric", "boolean", "category", "date", or "drop" if no kind takes it.

    Example:
      >>> kind_of_type(pa.string()), kind_of_type(pa.list_(pa.float32()))
      ('category', 'numeric')
    """
    if isinstance(kind, pa.BaseExtensionType):
        return kind_of_type(kind.storage_type)
    types = pa.types
    if types.is_dictionary(kind) or _is_list(kind):
        return kind_of_type(kind.value_type)
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "numeric"
    if types.is_timestamp(kind) or types.is_date(kind):
        return "date"
    text = types.is_string(kind) or types.is_large_string(kind)
    data = types.is_binary(kind) or types.is_large_binary(kind)
    if text or data or types.is_string_view(kind) or types.is_binary_view(kind):
        return "category"
    return DROP


def _is_list(kind: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_list(kind)
    return bool(fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind))
