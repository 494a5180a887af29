"""Ids of users as numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipelines.core.batches.manifest import Column
from pipelines.core.hashing import hash_ids
from pipelines.files.key_sources import insecure_key
from pipelines.inputs.parquet_blocks import seems_user_column

KEY = insecure_key(1)
NAMES = ["ann", "", "bob", "a name of more than 8 bytes", "ann", "a\0", "a"]


def test_equal_texts_have_equal_numbers_wherever_they_are() -> None:
    texts = pa.array(NAMES, pa.large_string())
    found = hash_ids(texts, KEY).tolist()
    assert [found.index(number) for number in found] == [0, 1, 2, 3, 0, 5, 6]
    assert hash_ids(texts.slice(2, 3), KEY).tolist() == found[2:5]
    assert not hash_ids(texts[:0], KEY).size


def test_texts_fill_the_range_evenly_and_by_the_key() -> None:
    texts = pa.array([f"user-{number}" for number in range(1 << 14)], pa.large_string())
    found = hash_ids(texts, KEY)
    assert len(np.unique(found)) == 1 << 14
    # The 16 shares of a job: each is Binomial(2**14, 1/16), within 6 deviations.
    counts = np.bincount((found >> np.uint64(60)).astype(int), minlength=16)
    assert abs(counts - 1024).max() < 6 * np.sqrt(1024 * 15 / 16)
    assert (hash_ids(texts, insecure_key(2)) != found).all()


def test_a_column_seems_to_hold_users_by_its_name_and_type_alone() -> None:
    def seems(name: str, dtype: str = "int64", shape: tuple[int, ...] = ()) -> bool:
        label = Column(name="label", dtype="float32")
        column = Column(name=name, dtype=dtype, shape=shape)
        return seems_user_column([label, column]) == name

    assert all(map(seems, ("user_id", "User", "patientID", "UID")))
    assert not any(map(seems, ("id", "user_age", "num_users")))
    assert not seems("user", "float32")
    assert not seems("user", shape=(3,))
