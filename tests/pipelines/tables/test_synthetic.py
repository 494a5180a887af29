"""What ``synthetic`` guarantees, and that there is something to learn."""

from __future__ import annotations

import pathlib
import tracemalloc

import numpy as np
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.tables import criteo, synthetic
from pipelines.tables.job import prepare_job
from pipelines.tables.synthetic import SynthOptions, write_synth


def text(folder: pathlib.Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def write(out: pathlib.Path, num_rows: int, num_files: int = 1, seed: int = 0) -> bytes:
    write_synth(out, SynthOptions(num_rows=num_rows, num_files=num_files, seed=seed))
    return text(out)


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """60,000 rows in two files.  Not to be changed."""
    out = tmp_path_factory.mktemp("synth") / "raw"
    write_synth(out, SynthOptions(num_rows=60_000, num_files=2))
    return out


@pytest.fixture(scope="session")
def fields(raw: pathlib.Path) -> np.ndarray:
    """Byte strings of shape (rows, 40)."""
    lines = text(raw).split(b"\n")
    assert lines.pop() == b""
    return np.array([line.split(b"\t") for line in lines])


def test_the_same_seed_gives_the_same_rows_and_another_others(
    tmp_path: pathlib.Path,
) -> None:
    first = write(tmp_path / "a", 500, seed=3)
    assert write(tmp_path / "b", 500, seed=3) == first
    other = write(tmp_path / "c", 500, seed=4)
    assert not set(other.splitlines()) & set(first.splitlines())


def test_more_rows_extend_fewer_and_files_only_cut(
    raw: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert text(raw).startswith(write(tmp_path / "few", 20_000))
    assert write(tmp_path / "many", 20_001, num_files=7) == b"".join(
        text(raw).splitlines(keepends=True)[:20_001]
    )
    counts = [
        path.read_bytes().count(b"\n") for path in sorted((tmp_path / "many").iterdir())
    ]
    assert len(counts) == 7
    assert max(counts) - min(counts) <= 1


def test_rows_of_different_blocks_differ(raw: pathlib.Path) -> None:
    lines = text(raw).splitlines()
    assert len(set(lines)) == len(lines)


def test_memory_does_not_grow_with_the_rows(tmp_path: pathlib.Path) -> None:
    peaks = []
    for num_rows in (30_000, 150_000):
        tracemalloc.start()
        write_synth(tmp_path / str(num_rows), SynthOptions(num_rows=num_rows))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Held in memory, 120,000 rows more are 29 MB of text.
    assert peaks[1] < peaks[0] + 2_000_000


def test_every_line_is_in_the_format_that_prepare_reads(raw: pathlib.Path) -> None:
    block = criteo.CriteoFormat(criteo.PrepareOptions()).parse(text(raw))
    assert block.num_rows == 60_000
    assert len(block.bad_rows) == 0


def test_a_quarter_of_the_labels_are_one(fields: np.ndarray) -> None:
    assert set(fields[:, 0]) == {b"0", b"1"}
    # 60,000 rows: standard deviation 0.0018.
    assert 0.24 < (fields[:, 0] == b"1").mean() < 0.26


def test_integers_are_heavy_tailed_with_missing_and_negative_values(
    fields: np.ndarray,
) -> None:
    integers = fields[:, 1:14]
    missing = (integers == b"").mean(axis=0)
    expected = [integer.missing for integer in synthetic._INTEGERS]
    # 60,000 rows: standard deviation at most 0.00204; 5 of them.
    np.testing.assert_allclose(missing, expected, atol=0.0102)
    # Columns of a group are missing together.
    assert ((integers[:, 0] == b"") == (integers[:, 9] == b"")).all()
    values = [column[column != b""].astype(np.int64) for column in integers.T]
    assert [index for index in range(13) if values[index].min() < 0] == [1]
    assert values[1].min() == -2
    heavy = [np.quantile(column, 0.99) > 5 * np.median(column) for column in values]
    assert sum(heavy) >= 10


def test_categories_are_skewed_strings_of_eight_digits(fields: np.ndarray) -> None:
    for law, column in zip(synthetic._CATEGORIES, fields[:, 14:].T, strict=True):
        present = column[column != b""]
        assert abs(1 - len(present) / len(column) - law.missing) < 0.0102
        names, counts = np.unique(present, return_counts=True)
        assert (np.char.str_len(names) == 8).all()
        assert len(names) <= law.size
        # The most frequent values take more than their share.
        top = np.sort(counts)[::-1]
        assert top[0] > 1.1 * len(present) / law.size
        if law.size > 20:
            assert top[: law.size // 10].sum() > 0.2 * len(present)
    assert len(np.unique(fields[:, 16])) > 15_000  # a long tail


def load(folder: pathlib.Path) -> tuple[object, np.ndarray]:
    """Features of a linear model, logarithms and one-hot categories, and labels."""
    from scipy import sparse

    table = pq.read_table(folder).combine_chunks()
    integers = table["integers"].chunk(0).flatten().to_numpy().reshape(-1, 13)
    integers = np.sign(integers) * np.log1p(np.abs(integers))
    categories = table["categories"].chunk(0).flatten().to_numpy().reshape(-1, 26)
    columns = (categories + 1024 * np.arange(26)).reshape(-1)
    rows = np.repeat(np.arange(len(integers)), 26)
    one_hot = sparse.csr_matrix(
        (np.ones(len(columns)), (rows, columns)), (len(integers), 26 * 1024)
    )
    features = sparse.hstack([np.nan_to_num(integers), one_hot]).tocsr()
    return features, table["label"].to_numpy()


def test_a_cheap_model_learns_the_signal(
    raw: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    prepare_job.prepare(str(raw), tmp_path / "data", criteo.PrepareOptions())
    features, label = load(tmp_path / "data" / "train")
    # Of half of the rows and roughly: 0.80; of all, to the end, it takes four times as
    # long for 0.82.
    model = LogisticRegression(C=0.01, solver="liblinear", tol=0.1)
    model.fit(features[:24_000], label[:24_000])
    features, label = load(tmp_path / "data" / "test")
    # 6,000 rows: standard deviation of an AUC of 0.8 about 0.007.
    assert roc_auc_score(label, model.decision_function(features)) > 0.78


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 0}, "--rows=0 >= 1"),
        ({"num_files": 0}, "--files=0 >= 1"),
        ({"num_files": 11}, "--files=11 <= 10. Every file holds a row."),
        ({"seed": -1}, "--seed=-1 >= 0"),
    ],
)
def test_options_out_of_bounds_are_refused(
    change: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        SynthOptions(**{"num_rows": 10, **change})
