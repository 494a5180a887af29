"""Guarantees of pipelines.core.resample, and of the certificate that it leads to."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.plan import SAMPLERS, DpSgdPlan
from accounting.core.validation import InputError
from pipelines.batches.folder import (
    CERTIFICATE_NAME,
    read_certificate,
    read_checksums,
    read_manifest,
    stored,
    write_manifest,
)
from pipelines.batches.verify import verify
from pipelines.certify import certify
from pipelines.core import resample, rows
from pipelines.core.batches.batch_format import Example, iterate_records, write_record
from pipelines.core.batches.manifest import FileChecksum, RecordChecksum
from pipelines.core.users import UserBound
from pipelines.files.key_sources import read_key_file
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.packing import Layout
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout
from pipelines.tables.prepare import UserOptions, of_numbers, prepare
from tests.pipelines.conftest import Command
from tests.sampler_fields import needed

#: How the tests make batches of `input_folder`, whose rows are 100.
PLAN: dict[str, Any] = {"num_examples": 100, "expected_batch_size": 10}


def layout_of(source: pathlib.Path, **changes: Any) -> Layout:
    dataset = list_blocks(str(source))
    fields = {**PLAN, "num_steps": 40, **changes}
    fields = {**needed(fields["sampler"], cap=14, bands=3), **fields}
    layout = make_layout(DpSgdPlan(**fields), dataset, 4)
    return dataclasses.replace(layout, steps_per_group=7)


def make(source: pathlib.Path, out: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Batches of several files and records per step."""
    layout = layout_of(source, **changes)
    write_batches(dataset=list_blocks(str(source)), layout=layout, out=out)
    return out


@pytest.fixture(scope="module")
def sampled(
    tmp_path_factory: pytest.TempPathFactory, input_folder: pathlib.Path
) -> pathlib.Path:
    """Truncated Poisson batches, some of whose steps are truncated."""
    folder = tmp_path_factory.mktemp("sampled") / "batches"
    return make(input_folder, folder, sampler="truncated-poisson")


@pytest.fixture
def batches(tmp_path: pathlib.Path, sampled: pathlib.Path) -> pathlib.Path:
    """A copy of ``sampled``, to be damaged."""
    return pathlib.Path(shutil.copytree(sampled, tmp_path / "batches"))


def differing(
    folder: pathlib.Path, source: pathlib.Path, memory: int = 1 << 30
) -> list[int]:
    """The steps that differ from the reference, by checksums alone."""
    manifest = read_manifest(folder)
    paths = {block.name: block.path for block in list_blocks(str(source)).blocks}
    key = read_key_file(folder / "private" / "sampling.key")
    again = resample.resampling(
        manifest.to_json(), key, rows.list_blocks([*paths.items()])
    )
    sums = read_checksums(folder).files
    written = itertools.chain.from_iterable(
        sums[f.name].records for f in manifest.files
    )
    done = [0]
    remade = again.steps(memory=memory, num_threads=2, progress=done.append)
    found = resample.differing_steps(remade, written)
    assert done == sorted(done)
    assert done[-1] == manifest.plan.num_steps
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_of_every_sampler_are_certified(
    input_folder: pathlib.Path, tmp_path: pathlib.Path, sampler: str
) -> None:
    folder = make(input_folder, tmp_path / "out", sampler=sampler, num_epochs=4)
    assert certify(folder, str(input_folder)).certified
    assert verify(folder).certified


# -- faults ------------------------------------------------------------------------

#: The records of all steps, as features that a fault changes: by step, then by part.
Records = dict[int, list[Example]]


def cells(record: Example, name: str) -> np.ndarray:
    """A copy of a bytes feature, as one line of bytes per row."""
    data = record.features.feature[name].bytes_list.value[0]
    return np.frombuffer(data, np.uint8).reshape(4, -1).copy()


def put(record: Example, name: str, values: np.ndarray) -> None:
    record.features.feature[name].bytes_list.value[0] = values.tobytes()


def num_real(record: Example) -> int:
    return int(np.count_nonzero(cells(record, "weight").any(axis=1)))


def is_whole(record: Example) -> bool:
    return num_real(record) == 4


def is_part(record: Example) -> bool:
    return 0 < num_real(record) < 4


def first(
    records: Records, is_wanted: Callable[[Example], bool]
) -> tuple[int, Example]:
    return next((s, r) for s, parts in records.items() for r in parts if is_wanted(r))


def copy_row(source: Example, row: int, target: Example, place: int) -> None:
    """Writes a row of one record over a row of another, with its weight."""
    for name in ("id", "pair", "label", "weight"):
        values = cells(target, name)
        values[place] = cells(source, name)[row]
        put(target, name, values)


def clear_row(record: Example, place: int) -> None:
    for name in ("id", "pair", "label", "weight"):
        values = cells(record, name)
        values[place] = 0
        put(record, name, values)


def no_fault(records: Records) -> set[int]:
    return set()


def a_row_moved(records: Records) -> set[int]:
    """To the padding of the next step that has some."""
    step, source = first(records, is_part)
    rest = {s: parts for s, parts in records.items() if s > step}
    other, target = first(rest, is_part)
    copy_row(source, num_real(source) - 1, target, num_real(target))
    clear_row(source, num_real(source) - 1)
    return {step, other}


def two_rows_swapped(records: Records) -> set[int]:
    """Between two steps: all sizes stay."""
    step, one = first(records, is_whole)
    other, two = first({s: parts for s, parts in records.items() if s > step}, is_whole)
    kept = Example.FromString(one.SerializeToString())
    copy_row(two, 0, one, 0)
    copy_row(kept, 0, two, 0)
    return {step, other}


def a_row_dropped(records: Records) -> set[int]:
    step, record = first(records, is_part)
    clear_row(record, num_real(record) - 1)
    return {step}


def a_row_doubled(records: Records) -> set[int]:
    step, record = first(records, is_part)
    copy_row(record, 0, record, num_real(record))
    return {step}


def a_padding_weight_changed(records: Records) -> set[int]:
    step, record = first(records, is_part)
    weight = cells(record, "weight").view("<f4")
    weight[num_real(record)] = 1
    put(record, "weight", weight)
    return {step}


def a_bit_of_a_row_changed(records: Records) -> set[int]:
    step, record = first(records, is_whole)
    values = cells(record, "pair")
    values[2, 0] ^= 1
    put(record, "pair", values)
    return {step}


def order_of_rows_changed(records: Records) -> set[int]:
    """Another row would be truncated if the order did not count."""
    step, record = first(records, is_whole)
    for name in ("id", "pair", "label"):
        put(record, name, cells(record, name)[[1, 0, 2, 3]])
    return {step}


def a_step_too_many(records: Records) -> set[int]:
    records[40] = [Example.FromString(r.SerializeToString()) for r in records[39]]
    for record in records[40]:
        record.features.feature["step"].int64_list.value[0] = 40
    return {40}


def a_step_missing(records: Records) -> set[int]:
    del records[17]
    return {17}


#: Fault -> whether checksums, which the faulty job writes, show it without resampling.
FAULTS = {
    no_fault: False,
    a_row_moved: False,
    two_rows_swapped: False,
    a_row_dropped: False,
    a_row_doubled: False,
    a_padding_weight_changed: False,
    a_bit_of_a_row_changed: False,
    order_of_rows_changed: False,
    a_step_too_many: True,
    a_step_missing: True,
}


def seal_key(folder: pathlib.Path) -> str:
    private = json.loads((folder / "private" / "checksums.json").read_bytes())
    found: str = private["seal_key"]
    return found


def read_records(folder: pathlib.Path) -> Records:
    found: Records = {}
    for file in read_manifest(folder).files:
        for record in iterate_records((folder / file.name).read_bytes()):
            example = Example.FromString(record)
            step = example.features.feature["step"].int64_list.value[0]
            found.setdefault(step, []).append(example)
    return found


def rewrite(folder: pathlib.Path, records: Records) -> None:
    """Writes records and their checksums as the job would have."""
    manifest, key, checksums = read_manifest(folder), seal_key(folder), {}
    last = manifest.files[-1]
    for file in manifest.files:
        steps: Iterable[int] = range(file.first_step, file.first_step + file.num_steps)
        if file == last:
            steps = [step for step in records if step >= file.first_step]
        checksums[file.name] = _rewrite_file(folder / file.name, records, steps)
    write_manifest(folder, manifest, checksums, seal_key=key)


def _rewrite_file(
    path: pathlib.Path, records: Records, steps: Iterable[int]
) -> FileChecksum:
    data, sums, real = bytearray(), list[RecordChecksum](), 0
    for step in steps:
        for record in records.get(step, []):
            part = record.features.feature["part"].int64_list.value[0]
            text = record.SerializeToString(deterministic=True)
            sums.append(write_record(data.extend, text, step=step, part=part))
            real += num_real(record)
    path.write_bytes(data)
    return FileChecksum(num_real=real, records=tuple(sums))


def steps_of(findings: Sequence[str]) -> set[int]:
    """The steps that the findings of the reference name."""
    found = set[int]()
    for finding in findings:
        if named := re.match(r"Expected step (\d+)(?: to (\d+))? to be as", finding):
            first, last = named[1], named[2] or named[1]
            found.update(range(int(first), int(last) + 1))
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_records_are_byte_for_byte_those_of_the_reference(
    batches: pathlib.Path,
    input_folder: pathlib.Path,
    fault: Callable[[Records], set[int]],
) -> None:
    records = read_records(batches)
    expected = fault(records)
    rewrite(batches, records)
    assert bool(verify(batches).findings) == FAULTS[fault]
    result = certify(batches, str(input_folder))
    assert steps_of(result.findings) == expected
    assert result.certified == (not expected) == (not result.findings)
    assert (batches / CERTIFICATE_NAME).exists() == (not expected)


def pretend(folder: pathlib.Path, sampled: pathlib.Path) -> None:
    """Gives batches the manifest and the key of others, as a wrong job would."""
    told, checksums = read_manifest(sampled), read_checksums(folder).files
    for name in ("manifest.json", "private/sampling.key"):
        shutil.copy(sampled / name, folder / name)
    named = dict(zip([f.name for f in told.files], checksums.values(), strict=True))
    for old, new in zip(checksums, named, strict=True):
        (folder / old).rename(folder / new)
    write_manifest(folder, told, named, seal_key=seal_key(sampled))


@pytest.mark.parametrize(
    "changes",
    [
        {},  # another key alone
        {"expected_batch_size": 12},
        {"truncated_batch_size": 13},
        {"sampler": "poisson", "truncated_batch_size": None},
    ],
)
def test_sampled_under_the_key_and_by_the_plan(
    sampled: pathlib.Path,
    input_folder: pathlib.Path,
    tmp_path: pathlib.Path,
    changes: dict[str, Any],
) -> None:
    out, fields = tmp_path / "out", {"sampler": "truncated-poisson", **changes}
    layout = layout_of(input_folder, **fields)
    dataset = list_blocks(str(input_folder))
    key_file = sampled / "private" / "sampling.key" if changes else None
    if key_file:  # of a fixed key, another plan
        write_batches(dataset=dataset, layout=layout, out=out, key_file=key_file)
    else:
        write_batches(dataset=dataset, layout=layout, out=out)
    pretend(out, sampled)
    result = certify(out, str(input_folder))
    assert len(steps_of(result.findings)) > 30
    assert not result.certified
    assert "reference sampler" in result.findings[-1]


def test_another_key_and_other_rows_are_refused(
    batches: pathlib.Path,
    input_folder: pathlib.Path,
    key_file: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(InputError, match="--key-file and --input"):
        certify(batches, str(input_folder), key_file)
    source = pathlib.Path(shutil.copytree(input_folder, tmp_path / "input"))
    table = pq.read_table(source / "part-1.parquet")
    pq.write_table(table.slice(0, 39), source / "part-1.parquet", row_group_size=25)
    with pytest.raises(InputError, match="those of the batches"):
        certify(batches, str(source))


def test_rows_changed_below_an_equal_footer_are_found(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "input"
    source.mkdir()

    def write(values: np.ndarray) -> None:
        table = pa.table({"x": values})
        pq.write_table(
            table, source / "part.parquet", row_group_size=25, write_statistics=False,
            use_dictionary=False, compression="none",
        )  # fmt: skip

    values = np.arange(100)
    write(values)
    folder = make(source, tmp_path / "out", sampler="deterministic", num_epochs=4)
    assert certify(folder, str(source)).certified
    write(values[::-1])
    assert len(certify(folder, str(source)).findings) == 1
    assert not (folder / CERTIFICATE_NAME).exists()


def test_at_most_so_much_memory_in_ranges_of_steps(
    batches: pathlib.Path, input_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resample, "_BASE_BYTES", 0)
    found = list[range]()
    kept = resample.Resampling._keep

    def keep(self: resample.Resampling, block: rows.RowGroup, *, steps: range) -> Any:
        found.append(steps)
        return kept(self, block, steps=steps)

    monkeypatch.setattr(resample.Resampling, "_keep", keep)
    # 25 rows of a block: 4 copies of 17 bytes, and 96 for each of 5 choices; two
    # threads.  10 rows of a step: 17 bytes, the longest column's 8 again, and 48.
    memory = 2 * 25 * (4 * 17 + 96 * 5) + 7 * 10 * (17 + 8 + 48)
    assert differing(batches, input_folder, memory) == []
    ranges = sorted(set(found), key=lambda steps: steps.start)
    assert [len(steps) for steps in ranges] == [7, 7, 7, 7, 7, 5]
    assert len(found) == 5 * len(ranges)
    with pytest.raises(InputError, match="Raise --memory-limit"):
        differing(batches, input_folder, memory - 6 * 730 - 1)


@pytest.mark.parametrize("sampler", ["poisson", "truncated-poisson"])
def test_batches_of_users_are_certified(tmp_path: pathlib.Path, sampler: str) -> None:
    ids = np.random.default_rng(3).integers(0, 60, 300)
    table = pa.table({"user": ids, "x": np.arange(300.0)})
    pq.write_table(table, tmp_path / "table.parquet")
    settings = UserBound(user_column="user", max_examples_per_user=3, num_examples=200)
    data, users = str(tmp_path / "table.parquet"), UserOptions(settings=settings)
    prepare(data, tmp_path / "bounded", of_numbers(data, "user"), users=users)
    source = str(tmp_path / "bounded" / "train")
    changes = {"num_examples": 200, "truncated_batch_size": None}
    if sampler == "truncated-poisson":
        changes["truncated_batch_size"] = 12
    folder = make(source, tmp_path / "out", sampler=sampler, **changes)
    assert certify(folder, source).certified
    # The unit of the statement is what a note says: that of the input, not of a job.
    told, sums = read_manifest(folder), read_checksums(folder).files
    note = {**told.dataset["bounded"], "max_examples_per_user": 1}
    told = dataclasses.replace(told, dataset={**told.dataset, "bounded": note})
    write_manifest(folder, told, sums, seal_key=seal_key(folder))
    with pytest.raises(InputError, match="described as in the manifest"):
        certify(folder, source)


def test_a_prepared_table_is_certified_by_the_command(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (
        "synth --rows 400 --out text",
        "prepare --input text --schema criteo --out data",
        "batches --input data/train --out batches --batch-size 20 --epochs 2 "
        "--physical-batch-size 16 --key-file key",
    ):
        ran = command(*line.split())
        assert ran.code == 0, ran.err
    line = "verify --resample batches --input data/train --key-file key --json"
    ran = command(*line.split())
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["certified"]
    assert "steps: " in ran.err
    ran = command("verify", "batches")
    assert (ran.code, "certified" in ran.out) == (0, True)


def test_too_little_memory_is_refused_before_the_certificate_is_removed(
    batches: pathlib.Path, input_folder: pathlib.Path, command: Command
) -> None:
    asked = ("verify", batches, "--resample", f"--input={input_folder}")
    assert command(*asked).code == 0
    ran = command(*asked, "--memory-limit=1MiB")
    assert ran.code != 0
    assert "memory_limit" in ran.err
    assert (batches / CERTIFICATE_NAME).exists()


# -- the certificate ---------------------------------------------------------------


def test_a_certificate_holds_nothing_sensitive(
    batches: pathlib.Path, input_folder: pathlib.Path
) -> None:
    certify(batches, str(input_folder))
    text = (batches / CERTIFICATE_NAME).read_text()
    fields = json.loads(text)
    assert set(fields) == {
        "format", "version", "manifest_fingerprint", "seal", "versions"
    }  # fmt: skip
    private = json.loads((batches / "private" / "checksums.json").read_bytes())
    secrets = [private["seal_key"], private["manifest_sha256"], *private["inputs"]]
    secrets.append((batches / "private" / "sampling.key").read_text().strip())
    for sums in private["files"].values():
        secrets += [record.split()[-1] for record in sums["records"]]
    assert not [secret for secret in secrets if secret in text]


def test_a_certificate_is_of_these_records_alone(
    batches: pathlib.Path, input_folder: pathlib.Path
) -> None:
    certify(batches, str(input_folder))
    manifest, certificate = read_manifest(batches), read_certificate(batches)
    assert certificate is not None
    id_before = stored(batches).records_id()
    assert certificate.is_about(manifest.fingerprint, id_before)
    assert not certificate.is_about("0" * 64, id_before)
    records = read_records(batches)
    a_row_dropped(records)
    rewrite(batches, records)
    assert not certificate.is_about(manifest.fingerprint, stored(batches).records_id())
    [finding] = verify(batches).findings
    assert CERTIFICATE_NAME in finding


def test_a_certificate_is_not_made_of_public_files(batches: pathlib.Path) -> None:
    """A run shows the digest of the seal, not the seal; and no seal is no name."""
    named = stored(batches).records_id()
    manifest = read_manifest(batches)
    forged = {"manifest_fingerprint": manifest.fingerprint, "versions": {}}
    for seal in (named, manifest.batches_id, ""):
        text = json.dumps(
            {"format": "dpsgd-certificate", "version": 1, "seal": seal, **forged}
        )
        (batches / CERTIFICATE_NAME).write_text(text)
        certificate = read_certificate(batches)
        assert certificate is not None
        assert not certificate.is_about(manifest.fingerprint, named)
        assert not certificate.is_about(manifest.fingerprint, "")
