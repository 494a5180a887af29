"""Runs of the same releases on other rows write the same files, and say the same.

Whatever differs here is told beside the weights, and covered by no epsilon.  Gradients
are 0 and the secret is one, so that the weights are equal; the rows of a step need none
to three physical batches, and some values are infinite.

Keyed names of the batches, dates and random names may differ.  Lazy noise is drawn for
reads: its weights have one law, not the same bits.
"""

from __future__ import annotations

import pathlib
import re
import zipfile
from typing import Any

import numpy as np
import pytest

from tests.trainer.conftest import make_rows, write_batches
from tests.trainer.export.test_own_numbers import (
    as_the_first,
    next_start,
    without_numbers,
)
from tests.trainer.run.whole_runs import private_settings
from trainer.core.step.bounded_sum import BoundedSum
from trainer.core.tf_compat import tf
from trainer.report.progress import Silent
from trainer.run.preflight import Request
from trainer.train import train

#: Numbers of rows of the steps of two runs.
STEPS = (3, 2, 4, 1), (9, 0, 5, 12)
#: A random name and hashes of the other files; when Keras saved.
NAMES_AND_DATES = "fingerprint.pb", "metadata.json"


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def _zero(one: Any) -> Any:
    if isinstance(one, tf.IndexedSlices):
        return tf.IndexedSlices(0 * one.values, one.indices, one.dense_shape)
    return 0 * one


@pytest.fixture
def releases_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_of = BoundedSum.__call__
    monkeypatch.setattr(
        BoundedSum, "__call__", lambda *given: [*map(_zero, sum_of(*given))]
    )


def _public(run: pathlib.Path, start: int) -> dict[str, bytes]:
    """The bytes of each public file, and of each in an archive, by name."""
    found = {}
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        if name.startswith("private") or path.is_dir():
            continue
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            found |= {f"{name}/{one}": archive.read(one) for one in archive.namelist()}
        else:
            found[name] = without_numbers(path, start)
    record = found["run_record.json"]
    keyed = rb'(?<="records_id": |  "checksum": )"\w+"'
    found["run_record.json"] = re.sub(keyed, b"", record)
    # Digests of files that are compared here, numbers of exports included.
    found["serving.json"] = re.sub(rb'"\w{64}"', b"", found["serving.json"])
    return {k: v for k, v in found.items() if not k.endswith(NAMES_AND_DATES)}


def _train(request: Request, start: int) -> tuple[dict[str, bytes], list[str]]:
    said = Said()
    with as_the_first(start):
        train(request, said)
    return _public(request.run, start), said.lines


@pytest.mark.usefixtures("releases_are_equal", "one_secret")
def test_files_and_messages_tell_nothing_beside_the_weights(
    request_for: Any, tmp_path: pathlib.Path
) -> None:
    found = []
    for sizes in STEPS:
        rows = [make_rows(size, 10 * size) for size in sizes]
        rows[0]["integers"][1] = np.inf if sizes[0] > 4 else 1
        made = write_batches(
            tmp_path / f"batches{sizes[0]}", rows,
            truncated_batch_size=None, physical_batch_size=4,
        )  # fmt: skip
        request = request_for(
            f"run{sizes[0]}",
            batches=made.path,
            settings=private_settings(l2_norm_clip=None, ema_decay=0.9, keep_last=2),
        )
        found.append(_train(request, next_start()))
    (files, said), (other_files, also_said) = found
    assert said == also_said
    names = files.keys() | other_files.keys()
    assert [n for n in sorted(names) if files.get(n) != other_files.get(n)] == []
    assert {"model.keras/config.json", "saved_model/saved_model.pb"} < names
