"""Tables as people bring them: in order, with dates, in other files, without labels."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from tests.criteo import write_schema

#: What every call of `fit` here says.
FIT = ("table.csv", "--label=y", "--rows-are-independent", "--epsilon=3")
HEAD = 'version = 1\n[columns.y]\nkind = "label"\ntask = "binary"\n'


def prepared(typed: Callable[..., str], part: str = "train") -> pa.Table:
    typed("prepare", "--input=table.csv", "--schema=schema.toml", "--out=data")
    return pq.read_table(f"data/{part}")


# -- rows in order ---------------------------------------------------------------------


def write_ordered() -> None:
    lines = [f"{row % 97},{int(row >= 1000)}" for row in range(2_000)]
    pathlib.Path("table.csv").write_text("\n".join(["size,y", *lines]))


def test_every_part_of_a_table_in_order_of_its_label_has_all_classes(
    typed: Callable[..., str],
) -> None:
    write_ordered()
    pathlib.Path("schema.toml").write_text(f'{HEAD}[columns.size]\nkind = "numeric"\n')
    assert set(prepared(typed)["label"].to_pylist()) == {0, 1}
    assert set(pq.read_table("data/test")["label"].to_pylist()) == {0, 1}


def test_a_run_that_cannot_learn_ends_before_it_trains(
    typed: Callable[..., str],
) -> None:
    """All rows of `val` and `test`, and none of these that train, are of one class."""
    write_ordered()
    pathlib.Path("schema.toml").write_text(
        f'{HEAD}[columns.size]\nkind = "numeric"\n[split]\nby = "fraction"\n'
        "shares = [50, 25, 25]\n"
    )
    with pytest.raises(InputError, match="class"):
        typed("fit", "table.csv", "--schema=schema.toml", "--rows-are-independent",
              "--epsilon=20", "--delta=1e-3", "--epochs=1", "--batch-size=1000",
              "--train=--hidden 2")  # fmt: skip
    assert not pathlib.Path("table-fit/run").exists()


# -- dates and files -------------------------------------------------------------------


def test_a_file_of_criteo_without_labels_is_predicted(
    typed: Callable[..., str],
) -> None:
    typed("synth", "--rows=2000", "--out=text")
    write_schema(pathlib.Path("schema.toml"), 9)
    typed("prepare", "--input=text", "--schema=schema.toml", "--out=data")
    typed("batches", "--input=data/train", "--out=batches", "--batch-size=1600",
          "--epochs=1")  # fmt: skip
    typed("train", "--batches=batches", "--out=run", "--noise-multiplier=1",
          "--delta=1e-5", "--hidden=2")  # fmt: skip
    (text,) = pathlib.Path("text").iterdir()
    lines = text.read_text().splitlines()[:50]
    unlabelled = [line.partition("\t")[2] for line in lines]
    pathlib.Path("test.txt").write_text("\n".join(unlabelled) + "\n")
    typed("predict", "run", "--input=test.txt", "--out=scores.csv")


# -- flags and messages ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["0", "1", "2"], "--classes"),
        (["alive", "dead"], "--classes"),
        (["1.5", "20"], "--range"),
        (["0", ""], "y is missing"),
    ],
)
def test_a_label_that_needs_a_flag_names_it_once(
    labels: list[str], says: str, typed: Callable[..., str]
) -> None:
    pathlib.Path("table.csv").write_text("\n".join(["size,y", *(
        f"1,{label}" for label in labels * 20
    )]))  # fmt: skip
    with pytest.raises(InputError) as error:
        typed("fit", *FIT, "--numeric=size")
    assert str(error.value).count(says) == 1


def test_malformed_rows_may_be_omitted_by_fit(typed: Callable[..., str]) -> None:
    lines = ['"size, in cm",y', *["1,0", "2,1"] * 1000, "3,maybe"]
    pathlib.Path("table.csv").write_text("\n".join(lines))
    flags = ["fit", *FIT, '--numeric="size, in cm"', "--dry-run"]
    with pytest.raises(InputError, match="1 of 2001 are malformed"):
        typed(*flags)
    typed(*flags, "--on-bad-row=skip")
    assert pathlib.Path("table-fit/first").is_dir()
