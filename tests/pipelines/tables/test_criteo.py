"""What ``pipelines.tables.criteo`` guarantees, held against one row at a time."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.core.validation import InputError
from pipelines.core.users.hashing import GOLDEN
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from pipelines.tables import criteo, raw_files
from pipelines.tables.convert import SPLITS, ParsedBlock, split_counts
from pipelines.tables.criteo import PrepareOptions
from pipelines.tables.job import prepare_job
from pipelines.tables.job.prepare_job import prepare
from tests.pipelines.conftest import prepared_bytes

CANARY = "5ec4e7ca"
OPTIONS = PrepareOptions()

ROW = [
    430, 982, 395, 588, 830, 553, 807, 607, 226, 691, 837, 747, 984,
    683, 281, 916, 238, 51, 639, 629, 725, 332, 294, 375, 392, 729,
]  # fmt: skip

NO_INTEGER = "is not an integer of at most 18 digits"

Line = list[str]


def make_lines(count: int, seed: int = 0) -> list[Line]:
    """Well-formed lines whose fourth integer is their number."""
    random = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        integers = [str(value) for value in random.integers(-3, 10**6, 13)]
        categories = [f"{value:08x}" for value in random.integers(0, 2**32, 26)]
        integers[0] = categories[0] = ""
        integers[3] = str(number)
        lines.append([str(random.integers(2)), *integers, *categories])
    return lines


def as_bytes(lines: list[Line], end: str = "\n") -> bytes:
    return "".join("\t".join(line) + end for line in lines).encode()


@pytest.fixture
def text(tmp_path: pathlib.Path) -> Callable[..., str]:
    """``text(lines, name="in.txt")`` writes lines and returns the path."""

    def write(lines: list[Line], name: str = "in.txt") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(as_bytes(lines))
        return str(path)

    return write


def read(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The columns of a split."""
    return arrays_of(pq.read_table(folder).combine_chunks())


def arrays_of(table: pa.Table) -> dict[str, np.ndarray]:
    columns = {"label": table["label"].to_numpy()}
    for name in ("integers", "categories"):
        chunks = table[name].chunks
        kind = table.schema.field(name).type
        flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
        empty = np.empty(0, "f4" if name == "integers" else "i4")
        columns[name] = np.concatenate([empty, *flat]).reshape(-1, kind.list_size)
    return columns


# --- An obvious implementation, a row at a time ------------------------------------


def mix(state: int) -> int:
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) % 2**64
    return state ^ state >> 31


def hash_string(salt: int, string: bytes) -> int:
    state = salt ^ len(string) * GOLDEN % 2**64
    for start in range(0, max(len(string), 1), 8):
        state = mix(state ^ int.from_bytes(string[start : start + 8], "little"))
    return state


def parse_line(line: bytes, num_buckets: int) -> tuple[int, list[float], list[int]]:
    """The row of a line; ValueError, with the reason, if malformed."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != 40 and line.strip(b"\r"):  # an empty line has 40 empty cells
        raise ValueError("another number of cells")
    if fields[0] not in (b"0", b"1"):
        raise ValueError("label is not 0 or 1")
    integers = []
    for number, field in enumerate(fields[1:14]):
        digits = field.removeprefix(b"-")
        if field and not (0 < len(digits) <= 18 and set(digits) <= set(b"0123456789")):
            raise ValueError(f"integer {number + 1} {NO_INTEGER}")
        integers.append(
            np.int64(int(field)).astype("f4") if field else np.float32("nan")
        )
    salts = [mix((column + 1) * GOLDEN % 2**64) for column in range(26)]
    categories = [
        1 + ((hash_string(salt, field) >> 32) * (num_buckets - 1) >> 32) if field else 0
        for salt, field in zip(salts, fields[14:], strict=True)
    ]
    return int(fields[0]), integers, categories


def parsed_by(data: bytes, options: PrepareOptions = OPTIONS) -> ParsedBlock:
    """The blocks of some lines as one."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        (listed,) = raw_files.list_files(file.name)
        found = criteo.CriteoFormat(options)
        blocks = [found.parse(block) for block, _ in found.blocks(listed)]
    first, reasons = 0, {}
    for block in blocks:
        reasons |= {first + row: reason for row, reason in block.reasons.items()}
        first += block.num_rows
    table = pa.concat_tables([block.table for block in blocks]).combine_chunks()
    return ParsedBlock(num_rows=first, reasons=reasons, table=table)


def check_against_reference(data: bytes, num_buckets: int) -> None:
    parsed = parsed_by(data, PrepareOptions(num_buckets=(num_buckets,) * 26))
    rows, bad = [], {}
    lines = data.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines):
        try:
            rows.append(parse_line(line, num_buckets))
        except ValueError as error:
            bad[number] = str(error)
    assert parsed.num_rows == len(lines)
    assert parsed.reasons == bad
    labels, integers, categories = zip(*rows, strict=True) if rows else ((), (), ())
    found = arrays_of(parsed.table)
    assert found["label"].tolist() == list(labels)
    expected = np.array(integers, "f4").reshape(-1, 13)
    np.testing.assert_array_equal(found["integers"], expected)
    assert found["categories"].tolist() == list(categories)


integers = st.one_of(
    st.just(""),
    st.integers(-(10**18) + 1, 10**18 - 1).map(str),
    st.integers(-200, 20000).map(str),
    st.from_regex(r"-?[0-9]{0,20}", fullmatch=True),
    st.text(alphabet="0123456789-+. :/\x00A", max_size=10),
)
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\n\r"), max_size=30
).map(str.encode)
strings = st.one_of(
    st.just(b""),
    st.integers(0, 2**32 - 1).map(lambda value: b"%08x" % value),
    TEXTS,
)
good_integers = st.one_of(st.just(""), st.integers(-(10**9), 10**17).map(str))


def lines_of(numbers: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    fields = st.tuples(
        st.sampled_from(["0", "1", "0", "1", "0", "1", "2", "", "01"]),
        st.lists(numbers, min_size=13, max_size=13),
        st.lists(strings, min_size=26, max_size=26),
    )
    return fields.map(
        lambda parts: b"\t".join([*map(str.encode, [parts[0], *parts[1]]), *parts[2]])
    )


odd_lines = st.one_of(
    st.sampled_from([b"", b"\t" * 38, b"\t" * 40, b"0" + b"\t" * 39]),
    TEXTS,
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(lines_of(good_integers), lines_of(integers), odd_lines), min_size=1
    ),
    st.sampled_from([2, 3, 1000, 2**31 - 1]),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_every_line_equals_the_obvious_implementation(
    lines: list[bytes], num_buckets: int, end: bytes
) -> None:
    check_against_reference(b"".join(line + end for line in lines), num_buckets)


def test_real_rows_equal_the_obvious_implementation(
    criteo_sample: pathlib.Path,
) -> None:
    check_against_reference(criteo_sample.read_bytes(), 1024)


# --- Values ------------------------------------------------------------------------


def parse(*lines: Line, options: PrepareOptions = OPTIONS) -> dict[str, np.ndarray]:
    return arrays_of(parsed_by(as_bytes(list(lines)), options).table)


def test_hashed_values_are_golden() -> None:
    # Equal on every machine and release: a model is worthless with other buckets.
    # Recipe: the obvious implementation above, and by hand for the first of them:
    #   h = mix(mix(golden) ^ 8 * golden ^ int.from_bytes(b"68fd1e64", "little"))
    row = parse(["1"] + [""] * 13 + ["68fd1e64"] * 24 + ["click here, please", "x"])
    assert row["categories"][0].tolist() == ROW


def test_hashed_values_lie_in_one_to_buckets_and_are_spread_evenly() -> None:
    lines = make_lines(2000)
    options = PrepareOptions(num_buckets=(11,) * 26)
    values = parse(*lines, options=options)["categories"][
        :, 1:
    ]  # the first one is missing
    counts = np.bincount(values.reshape(-1), minlength=11)
    assert counts[0] == 0
    assert len(counts) == 11
    # 50,000 values in 10 buckets: binomial, standard deviation 67; 6 of them.
    np.testing.assert_allclose(counts[1:], 5000, atol=402)


def test_columns_hash_independently() -> None:
    strings = [f"{value:08x}" for value in range(2000)]
    options = PrepareOptions(num_buckets=(2 + 9,) * 26)
    lines = [["0"] + [""] * 13 + [string] * 26 for string in strings]
    categories = parse(*lines, options=options)["categories"]
    for first in range(25):
        for second in range(first + 1, 26):
            # Agreement by chance: 2000 of probability 1/10, deviation 13.4; 6 of them.
            same = categories[:, first] == categories[:, second]
            assert abs(same.sum() - 200) < 81


def test_a_missing_value_is_zero_or_nan_and_a_present_one_never_is() -> None:
    missing = parse(["0"] + [""] * 39)
    assert np.isnan(missing["integers"]).all()
    assert (missing["categories"] == 0).all()
    present = parse(["0"] + ["0"] * 13 + ["0"] * 26)
    assert (present["integers"] == 0).all()
    assert (present["categories"] > 0).all()


@pytest.mark.parametrize(
    "field",
    [
        *("-", "--1", "1-", "+1", " 1", "1 ", "1.0", "1e5", "0x1", "\u0661", "1_0"),
        *("/2345678", "1" * 19, "-" + "1" * 19),
    ],
)
def test_what_is_not_an_integer_is_malformed(field: str) -> None:
    lines = [["1", *[""] * 12, value, *["a"] * 26] for value in ("1", field)]
    reasons = parsed_by(as_bytes(lines)).reasons
    assert reasons == {1: f"integer 13 {NO_INTEGER}"}


# --- Splits and files --------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "split", "counts"),
    [
        (0, (80, 10, 10), (0, 0, 0)),
        (1, (80, 10, 10), (1, 0, 0)),
        (2, (80, 10, 10), (2, 0, 0)),
        (3, (80, 10, 10), (2, 1, 0)),
        (10, (80, 10, 10), (8, 1, 1)),
        (1999, (80, 10, 10), (1599, 200, 200)),
        (45_840_617, (80, 10, 10), (36_672_494, 4_584_061, 4_584_062)),
        (7, (1, 0, 0), (7, 0, 0)),
        (5, (1, 1, 0), (3, 2, 0)),
    ],
)
def test_split_counts_are_exact(
    num_rows: int, split: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    assert split_counts(num_rows, split) == counts


@given(st.integers(0, 10**12), st.tuples(*[st.integers(0, 100)] * 3))
def test_splits_hold_every_row_once(num_rows: int, split: tuple[int, ...]) -> None:
    if sum(split):
        counts = split_counts(num_rows, split)
        assert sum(counts) == num_rows
        assert min(counts) >= 0


@pytest.mark.parametrize("num_rows", [1, 2, 3, 9, 100])
def test_rows_keep_their_order_in_contiguous_splits(
    text: Callable[..., str], tmp_path: pathlib.Path, num_rows: int
) -> None:
    summary = prepare(text(make_lines(num_rows)), tmp_path / "out", OPTIONS)
    expected = split_counts(num_rows, (80, 10, 10))
    assert tuple(summary.num_rows.values()) == expected
    first = 0
    for name, count in zip(SPLITS, expected, strict=True):
        numbers = read(tmp_path / "out" / name)["integers"][:, 3]
        assert numbers.tolist() == list(range(first, first + count))
        first += count


def test_the_schema_is_what_the_batch_job_and_the_trainer_read(
    text: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    options = PrepareOptions(num_buckets=tuple(range(2, 28)))
    prepare(text(make_lines(10)), tmp_path / "out", options)
    schema = pq.read_schema(tmp_path / "out" / "train" / "part-00000.parquet")
    names = {field.name: str(field.type) for field in schema}
    assert names == {
        "label": "int8",
        "integers": "fixed_size_list<element: float not null>[13]",
        "categories": "fixed_size_list<element: int32 not null>[26]",
    }
    description = json.loads(schema.metadata[DATASET_METADATA_KEY])
    assert description["name"] == "criteo"
    assert description["num_buckets"] == list(range(2, 28))
    assert set(description["categories"]) == {"hashed"}


def test_row_groups_and_files_have_the_size_asked_for(
    text: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    options = PrepareOptions(row_group_rows=7, row_groups_per_file=3, split=(9, 1, 0))
    prepare(text(make_lines(100)), tmp_path / "out", options)
    groups = []
    for path in sorted((tmp_path / "out" / "train").iterdir()):
        metadata = pq.read_metadata(path)
        count = metadata.num_row_groups
        groups.append([metadata.row_group(i).num_rows for i in range(count)])
    assert groups == [[7, 7, 7]] * 4 + [[6]]
    numbers = read(tmp_path / "out" / "train")["integers"][:, 3]
    assert numbers.tolist() == list(range(90))


def test_an_empty_split_has_a_file_without_rows(
    text: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    prepare(text(make_lines(5)), tmp_path / "out", PrepareOptions(split=(1, 0, 0)))
    assert pq.read_table(tmp_path / "out" / "test").num_rows == 0


# --- Errors before any work, and nothing half-written ------------------------------


def refused(pattern: str, out: pathlib.Path, options: PrepareOptions = OPTIONS) -> str:
    """The message with which ``prepare`` refuses; checks that it left nothing."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(InputError) as caught:
        prepare(pattern, out, options)
    assert sorted(out.parent.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_input_that_cannot_be_read_is_refused(
    text: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "out"
    assert "there are none" in refused(str(tmp_path / "*.tsv"), out)
    assert "it is empty" in refused(text([], "empty.txt"), out)


def test_a_file_without_line_ends_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "image").write_bytes(b"x" * 7_000_000)
    message = refused(str(tmp_path / "image"), tmp_path / "out")
    assert "A row is longer than" in message


def test_a_split_that_leaves_no_row_for_train_is_refused(
    text: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    path = text(make_lines(3))
    message = refused(path, tmp_path / "out", PrepareOptions(split=(10, 80, 10)))
    assert "3 well-formed rows leave none" in message
    bad = text([[CANARY]], "bad.txt")
    message = refused(bad, tmp_path / "out", PrepareOptions(on_bad_row="skip"))
    assert "1 of 1 are malformed" in message
    assert "leaves them out unless all are" in message


def test_no_partial_output_after_a_failure(
    text: Callable[..., str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path, options = text(make_lines(60)), PrepareOptions(row_group_rows=10)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_job, "new_table", full)
        with pytest.raises(InputError, match="No space left on device"):
            prepare(path, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    prepare(path, tmp_path / "out", options)  # as the message says
    prepare(path, tmp_path / "wanted", options)
    assert prepared_bytes(tmp_path / "out") == prepared_bytes(tmp_path / "wanted")
    assert not (tmp_path / "out.unfinished").exists()
