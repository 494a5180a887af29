"""The bytes of a whole folder of batches, for one key and one input."""

from __future__ import annotations

import hashlib
import json
import pathlib

import pytest

from accounting.core.plan import DpSgdPlan
from pipelines.files.json_files import pretty_json
from pipelines.files.key_files import insecure_key
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout

#: Recipe: the first half of the SHA-256 over "NAME SHA-256" of every file, by name.
#: It changes with the sampler, the batch format and the manifest alone: then raise
#: FORMAT_VERSION and say so in the changelog.
GOLDEN = {
    "truncated-poisson": "adad5f5720b828ad76f596f9099651d7",
    "dynamic-shuffle": "3e75daa2b5a9a7583d525b17eff43b3b",
    "balls-and-bins": "949faf9717577a228c86d9355d225146",
}


def contents(path: pathlib.Path) -> bytes:
    """As when digests were of files, not of records, unsealed, of no known table."""
    if path.name != "checksums.json":
        return path.read_bytes()
    fields = json.loads(path.read_bytes())
    assert len(bytes.fromhex(fields.pop("seal_key"))) == 32
    assert fields.pop("key_sha256") == ""  # the key is elsewhere
    assert len(fields.pop("table")["sources"]) == 1
    for name, checksum in fields["files"].items():
        data = (path.parents[1] / name).read_bytes()
        checksum["num_records"] = len(checksum.pop("records"))
        checksum["size"] = len(data)
        checksum["sha256"] = hashlib.sha256(data).hexdigest()
    return pretty_json(fields)


def digest(folder: pathlib.Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [
        f"{path.relative_to(folder).as_posix()} "
        f"{hashlib.sha256(contents(path)).hexdigest()}\n"
        for path in files
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


@pytest.mark.parametrize("sampler", GOLDEN)
def test_the_bytes_of_a_key_are_those_of_earlier_releases(
    tmp_path: pathlib.Path, sampler: str
) -> None:
    # The footer of a Parquet file names the release that wrote it: this one is kept.
    dataset = list_blocks(str(pathlib.Path(__file__).parent / "golden"))
    plan = DpSgdPlan(
        sampler=sampler, num_examples=40, expected_batch_size=4, num_steps=20,
        num_epochs=2, truncated_batch_size=5 if "truncated" in sampler else None,
    )  # fmt: skip
    key_file = tmp_path / "sampling.key"
    key_file.write_text(insecure_key(0).hex())
    key_file.chmod(0o600)
    layout = make_layout(plan, dataset, physical_batch_size=3)
    out = tmp_path / "batches"
    write_batches(dataset=dataset, layout=layout, out=out, key_file=key_file)
    assert digest(out) == GOLDEN[sampler]
