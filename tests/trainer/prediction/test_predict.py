"""Predictions of tables, and their named classes."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from tests.trainer.conftest import make_rows, write_batches, write_held_out
from tests.trainer.run.whole_runs import AVERAGES, load_model, private_settings
from trainer.core.run.run_record import read_run, write_run
from trainer.model.metrics import CLASSES
from trainer.prediction import exported_model, predict
from trainer.prediction.predict import PREDICTED, with_classes
from trainer.run.preflight import Request
from trainer.train import train

ROWS = make_rows(300, seed=99)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished run with all averages, and the table of its evaluation."""
    root = tmp_path_factory.mktemp("predict")
    steps = [make_rows(8, seed) for seed in range(10)]
    batches = write_batches(root / "batches", steps)
    settings = private_settings(**{**AVERAGES, "tail": None}, learning_rate=0.3)
    table = write_held_out(root / "table", ROWS)
    train(
        Request(
            settings=settings, batches=batches.path, held_out=table, run=root / "run"
        )
    )
    return root


def _predict(folder: pathlib.Path, out: pathlib.Path, **more: Any) -> pa.Table:
    table = more.pop("table", folder / "table")
    summary = predict.predict(folder / "run", table, out, **more)
    found = pq.read_table(out)
    assert summary.columns == tuple(found.column_names)
    assert summary.num_rows == found.num_rows
    return found


def _by_keras(path: pathlib.Path) -> np.ndarray:
    columns = {name: ROWS[name] for name in ("integers", "categories")}
    return np.ravel(load_model(path).predict(columns, verbose=0))


@pytest.mark.parametrize("average", [None, "upa"])
def test_predictions_are_those_of_the_exported_model_in_the_order_of_the_rows(
    average: str | None, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    found = _predict(folder, tmp_path / "out.parquet", average=average)
    prefix = f"{average}_" if average else ""
    wanted = _by_keras(folder / "run" / f"{prefix}model.keras")
    assert wanted.std() > 1e-3
    np.testing.assert_allclose(found["probability"], wanted, rtol=1e-5)
    np.testing.assert_array_equal(found["predicted"], wanted > 0.5)


def test_intervals_are_of_the_predictions_of_the_kept_iterates(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    found = _predict(folder, tmp_path / "out.parquet", uncertainty=0.9)
    model, each = load_model(folder / "run" / "model.keras"), []
    columns = {name: ROWS[name] for name in ("integers", "categories")}
    for path in sorted((folder / "run" / "iterates").iterdir()):
        with np.load(path) as weights:
            model.set_weights([weights[name] for name in weights])
        each.append(np.ravel(model.predict(columns, verbose=0)))
    np.testing.assert_allclose(found["probability"], np.mean(each, 0), rtol=1e-5)
    stddev = np.std(each, 0, ddof=1)
    np.testing.assert_allclose(found["stddev"], stddev, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("file", "data"),
    [("variables/variables.data-00000-of-00001", None), ("saved_model.pb", bytes(64))],
)
def test_a_damaged_model_is_refused(
    folder: pathlib.Path, tmp_path: pathlib.Path, file: str, data: bytes | None
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run" / "saved_model" / file
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match="run/saved_model to be a model that this"):
        predict.predict(tmp_path / "run", folder / "table", tmp_path / "o.parquet")


def test_a_table_may_lack_the_label_and_have_other_columns_and_files(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    whole = _predict(folder, tmp_path / "whole.parquet")
    table = pq.read_table(folder / "table").drop_columns(["label"])
    table = table.append_column("id", pa.array(range(len(ROWS))))
    (tmp_path / "parts").mkdir()
    for index, first in enumerate((0, 100, 299)):
        part = table.slice(first, (100, 199, 1)[index])
        pq.write_table(part, tmp_path / "parts" / f"{index}.parquet")
    found = _predict(
        folder, tmp_path / "out.parquet", table=tmp_path / "parts", carry=["id"]
    )
    np.testing.assert_allclose(found["probability"], whole["probability"], rtol=1e-5)
    assert found["id"].to_pylist() == list(range(len(ROWS)))
    named = table.rename_columns({"id": "predicted"})
    named = named.replace_schema_metadata(table.schema.metadata)
    pq.write_table(named, tmp_path / "named.parquet")
    with pytest.raises(InputError, match="carry to be called as a prediction"):
        _predict(
            folder, tmp_path / "none.parquet", table=tmp_path / "named.parquet",
            carry=["predicted"],
        )  # fmt: skip
    assert not (tmp_path / "none.parquet").exists()


def test_csv_has_no_column_of_lists(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    given = folder / "run", folder / "table", tmp_path / "out.csv"
    with pytest.raises(InputError, match="no column of lists in CSV, as integers"):
        predict.predict(*given, carry=["integers"])


@pytest.mark.parametrize("average", ["last", "opa"])
def test_a_bounded_number_of_rows_is_in_memory_at_a_time(
    average: str,
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = _predict(folder, tmp_path / "whole.parquet", average=average)
    monkeypatch.setattr(predict, "_CHUNK_BYTES", 7 * 26 * 4 + 7 * 13 * 4)
    monkeypatch.setattr(exported_model, "_BATCH_ROWS", 3)
    sizes: list[int] = []
    write = predict.WrittenTable.write

    def spy(self: Any, table: pa.Table) -> None:
        sizes.append(table.num_rows)
        write(self, table)

    monkeypatch.setattr(predict.WrittenTable, "write", spy)
    found = _predict(folder, tmp_path / "out.parquet", average=average)
    assert max(sizes) == 7
    # Sums in another order; the noise of the run, and so its logits, vary by source.
    np.testing.assert_allclose(found["probability"], whole["probability"], rtol=1e-4)


def test_an_error_on_the_way_leaves_nothing_and_quotes_no_row(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "_CHUNK_ROWS", 100)
    table = pq.read_table(folder / "table").to_pylist()
    table[250]["integers"][3] = None
    broken = pa.Table.from_pylist(table, pq.read_schema(_file(folder)))
    pq.write_table(broken, tmp_path / "broken.parquet")
    written: list[int] = []
    monkeypatch.setattr(
        predict.WrittenTable, "write",
        lambda self, rows: written.append(rows.num_rows),
    )  # fmt: skip
    with pytest.raises(InputError, match="column integers of --input to hold no nul"):
        predict.predict(
            folder / "run", tmp_path / "broken.parquet", tmp_path / "out.parquet"
        )
    assert written  # the error is not of the first rows
    assert [path.name for path in tmp_path.iterdir()] == ["broken.parquet"]


def _file(folder: pathlib.Path) -> pathlib.Path:
    return folder / "table" / "part-00000.parquet"


def test_an_unfinished_run_and_one_without_a_model_are_refused(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "saved_model")

    def check() -> None:
        run, table = tmp_path / "run", folder / "table"
        predict.predict(run, table, tmp_path / "out")

    with pytest.raises(InputError, match="saved_model to exist"):
        check()
    record, manifest = read_run(tmp_path / "run")
    fits = [{**fit, "ended": False} for fit in record.fits]
    unfinished = dataclasses.replace(
        record, complete=False, model={**record.model, "fits": fits}
    )
    write_run(tmp_path / "run", unfinished, manifest)
    with pytest.raises(InputError, match="finished run"):
        check()


NAMES = ("red", "<green>", "dark blue")
PROBABILITIES = np.array([[0.1, 0.5, 0.4], [0.4, 0.2, 0.4], [0.2, 0.2, 0.6]])


def test_the_columns_of_classes_have_their_names() -> None:
    found = with_classes(
        {"probabilities": PROBABILITIES, "stddev": PROBABILITIES / 9}, CLASSES, NAMES
    )
    assert list(found) == [
        PREDICTED,
        "probability_red", "probability_<green>", "probability_dark blue",
        "stddev_red", "stddev_<green>", "stddev_dark blue",
    ]  # fmt: skip
    # Of equal classes the first.
    assert found[PREDICTED].tolist() == ["<green>", "red", "dark blue"]
    for number, name in enumerate(NAMES):
        np.testing.assert_array_equal(
            found[f"probability_{name}"], PROBABILITIES[:, number]
        )
