"""Guarantees of pipelines.inputs.input_files: which files an input means."""

from __future__ import annotations

import os
import pathlib

import pytest

from accounting.core.validation import InputError
from pipelines.files import storage
from pipelines.inputs.input_files import find_files
from pipelines.inputs.parquet_blocks import list_blocks
from tests.pipelines.conftest import write_table


def put(path: pathlib.Path, first: int, count: int = 10) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(path, first, count, 5)


@pytest.fixture
def nested(tmp_path: pathlib.Path) -> pathlib.Path:
    """50 visible rows at three depths, and 30 rows and a marker that are hidden."""
    folder = tmp_path / "input"
    put(folder / "a.parquet", 0)
    put(folder / "b" / "c.parquet", 10, 20)
    put(folder / "b" / "d" / "e.parquet", 30, 20)
    for number, name in enumerate([".a.parquet", "_tmp/a.parquet", "b/.x/a.parquet"]):
        put(folder / name, 100 * (number + 1))
    (folder / "_SUCCESS").touch()
    return folder


NAMES = ["a.parquet", "b/c.parquet", "b/d/e.parquet"]


def test_a_folder_means_its_visible_files_at_any_depth(nested: pathlib.Path) -> None:
    dataset = list_blocks(str(nested))
    assert dataset.num_examples == 50
    assert dataset.files == {"a.parquet": 10, "b/c.parquet": 20, "b/d/e.parquet": 20}


def test_a_folder_of_a_store_means_the_same(
    nested: pathlib.Path, s3_folder: str
) -> None:
    place = s3_folder
    for path in nested.rglob("*"):
        if path.is_file():
            name = path.relative_to(nested).as_posix()
            storage.write_atomically(f"{place}/{name}", path.read_bytes())
    for pattern in ("", "/", "/**/*.parquet"):
        found = find_files(f"{place}{pattern}")
        assert [name for _, name in found] == NAMES
    assert list_blocks(place).digest == list_blocks(str(nested)).digest
    single = find_files(f"{place}/b/c.parquet")
    assert single == [(f"{place}/b/c.parquet", "c.parquet")]
    storage.write_atomically(f"{place}/b/notes.txt", b"")
    with pytest.raises(InputError, match=r"b/notes\.txt"):
        find_files(place)
    with pytest.raises(InputError, match="there are none"):
        find_files(f"{place}-other")
    with pytest.raises(InputError, match="whole folders"):
        find_files(f"{place}/a**/b")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/*.parquet", NAMES),  # ** is also no folder
        ("*.parquet", NAMES[:1]),
        ("*/*.parquet", NAMES[1:2]),
        ("b/**/*.parquet", ["c.parquet", "d/e.parquet"]),
        ("[ab]*/**/[!c].parquet", ["b/d/e.parquet"]),
        (".*.parquet", [".a.parquet"]),  # a dot that is asked for
        ("_tmp/*.parquet", ["a.parquet"]),
        ("b", ["c.parquet", "d/e.parquet"]),
        ("b/c.parquet", ["c.parquet"]),
    ],
)
def test_globs(nested: pathlib.Path, pattern: str, names: list[str]) -> None:
    assert [name for _, name in find_files(f"{nested}/{pattern}")] == names


def test_a_visible_file_that_is_not_parquet_is_named_with_a_remedy_that_works(
    nested: pathlib.Path,
) -> None:
    (nested / "b" / "rows.csv").write_text("canary")
    with pytest.raises(InputError, match=r"b/rows\.csv") as error:
        list_blocks(str(nested))
    remedy = str(error.value).split("--input '")[1].split("'")[0]
    assert [name for _, name in find_files(remedy)] == NAMES
    assert "canary" not in str(error.value)


def test_a_link_to_nothing_is_named(nested: pathlib.Path) -> None:
    (nested / "b" / "lost.parquet").symlink_to(nested / "nowhere.parquet")
    for pattern in ("", "/**/*.parquet", "/b/lost.parquet"):
        with pytest.raises(InputError, match=r"b/lost\.parquet.*link to nothing"):
            find_files(f"{nested}{pattern}")
    (nested / ".lost.parquet").symlink_to(nested / "nowhere.parquet")
    (nested / "b" / "lost.parquet").unlink()
    assert len(find_files(str(nested))) == len(NAMES)


def test_a_linked_folder_is_read_and_a_circle_is_named(nested: pathlib.Path) -> None:
    put(nested.parent / "elsewhere" / "z.parquet", 60)
    (nested / "b" / "link").symlink_to(nested.parent / "elsewhere")
    assert "b/link/z.parquet" in list_blocks(str(nested)).files
    (nested / "b" / "again").symlink_to(nested)
    with pytest.raises(InputError, match=r"b/again.*folder that it is in"):
        find_files(str(nested))


def test_one_file_by_two_names_is_refused(nested: pathlib.Path) -> None:
    """Its rows would each be two examples, and the stated epsilon false."""
    for link in (os.symlink, os.link):
        link(nested / "a.parquet", nested / "b" / "copy.parquet")
        with pytest.raises(InputError, match=r"a\.parquet and .*b/copy\.parquet"):
            find_files(str(nested))
        (nested / "b" / "copy.parquet").unlink()


def test_a_partition_column_is_refused_with_a_remedy_that_works(
    tmp_path: pathlib.Path,
) -> None:
    for user in ("canary", "other"):
        put(tmp_path / "in" / "x" / f"user={user}" / "_h=1" / "a.parquet", len(user))
    for pattern in (tmp_path / "in", tmp_path / "in" / "**" / "*.parquet"):
        with pytest.raises(InputError, match=r"partition folders user=\*") as error:
            list_blocks(str(pattern))
        assert "canary" not in str(error.value)
    remedy = str(error.value).split("leave it out with --input '")[1].split("'")[0]
    assert list_blocks(remedy).num_examples == 20
    # Inside of one partition every row has the same value.
    inner = list_blocks(str(tmp_path / "in" / "x" / "user=canary" / "_h=1"))
    assert inner.num_examples == 10


def test_nothing_visible_is_told_from_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match="there are none"):
        find_files(str(tmp_path / "absent"))
    put(tmp_path / "_temporary" / "a.parquet", 0)
    with pytest.raises(InputError, match=r"there are none.*hidden"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("fault", ["loop", "nothing", "twice"])
def test_no_error_about_a_link_quotes_a_user(
    tmp_path: pathlib.Path, fault: str
) -> None:
    """The value of a partition folder may be the id of a user."""
    user = tmp_path / "table" / "user=ann" / "day=3"
    user.mkdir(parents=True)
    (user / "part.parquet").write_bytes(b"rows")
    if fault == "loop":
        (user / "loop").symlink_to(tmp_path / "table")
    elif fault == "nothing":
        (tmp_path / "table" / "user=bob").symlink_to("user=eve")
    else:
        (tmp_path / "table" / "user=bob").symlink_to("user=ann")
    with pytest.raises(InputError, match=r"user=\*") as error:
        find_files(str(tmp_path / "table"))
    for name in ("=ann", "=bob", "=eve", "=3"):
        assert name not in str(error.value)
