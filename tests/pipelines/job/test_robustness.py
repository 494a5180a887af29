"""Retried, doubled, re-ordered and killed jobs give the bytes of an undisturbed one.

The faults, and where they are tried:

    bundles run twice, at once, in any order, or dying midway    harness of DoFns
    death between changes of the disk                            ``users/test_kills``
    full disk, lost or damaged input, a fault in a worker        the command
"""

from __future__ import annotations

import base64
import bz2
import concurrent.futures
import errno
import os
import pathlib
import pickle
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.internal import pickler
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from accounting.core.plan import SAMPLERS
from accounting.core.validation import InputError
from pipelines.batches.verify import verify
from pipelines.core.choices import PlanSampler
from pipelines.files.key_sources import read_key_file
from pipelines.inputs import parquet_blocks
from pipelines.inputs.parquet_blocks import know_input
from pipelines.job import packing, poisson_batching, transforms
from pipelines.job.job_folder import finish_job
from pipelines.job.spill import Spill
from tests.pipelines.conftest import Command, SmallJobs, contents
from tests.sampler_fields import needed

# Bundles, as an engine may run them.


class DiedError(Exception):
    """A worker was lost."""


class Chaos:
    """An engine that retries, doubles and re-orders, and whose workers die.

    Bundles are random; each is run twice, half of them at the same time, and each
    attempt is repeated until it survives.  Of two results an engine keeps any one.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.deaths = 0
        self._lock = threading.Lock()

    def may_die(self) -> None:
        with self._lock:
            if self.random.random() < 0.15:
                self.deaths += 1
                raise DiedError

    def run(self, fn: Any, elements: list[Any]) -> list[Any]:
        """All outputs of the DoFn ``fn``, shuffled."""
        payload, kept = pickler.dumps(fn), []
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for bundle in self._bundles(elements):
                at_once = self.random.random() < 0.5
                first = pool.submit(self._survive, payload, bundle)
                if not at_once:
                    concurrent.futures.wait([first])
                second = pool.submit(self._survive, payload, bundle)
                results = [first.result(), second.result()]
                assert sorted(results[0], key=repr) == sorted(results[1], key=repr)
                kept.extend(self.random.choice(results))
        self.random.shuffle(kept)
        return kept

    def _bundles(self, elements: list[Any]) -> Iterator[list[Any]]:
        elements = self.random.sample(elements, len(elements))
        while elements:
            size = self.random.randint(1, 3)
            yield elements[:size]
            elements = elements[size:]

    def _survive(self, payload: bytes, bundle: list[Any]) -> list[Any]:
        while True:
            fn = pickler.loads(payload)
            with self._lock:
                order = self.random.sample(bundle, len(bundle))
            try:
                return self._attempt(fn, order)
            except (DiedError, InputError):
                fn.teardown()  # what a worker that lives on does after a failure

    def _attempt(self, fn: Any, bundle: list[Any]) -> list[Any]:
        fn.setup()
        fn.start_bundle()
        outputs = []
        for element in bundle:
            self.may_die()
            outputs += pickle.loads(pickle.dumps(list(fn.process(element) or ())))
        self.may_die()
        fn.finish_bundle()
        fn.teardown()
        return outputs

    def shuffle(self, elements: list[tuple[int, Any]]) -> list[tuple[int, list[Any]]]:
        """A GroupByKey whose values come in any order."""
        groups: dict[int, list[Any]] = {}
        for key, value in elements:
            groups.setdefault(key, []).append(value)
        return list(groups.items())


def dying_writes(chaos: Chaos, patch: pytest.MonkeyPatch) -> None:
    """Lets writers die before, amid (leaving half a file) and after their writing."""

    def half(path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = f".{path.name}.{chaos.random.getrandbits(32)}"
        path.with_name(name).write_bytes(b"half of")

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(path: Any, *arguments: Any, **options: Any) -> None:
            chaos.may_die()
            try:
                chaos.may_die()
            except DiedError:
                half(pathlib.Path(path))
                raise
            write(path, *arguments, **options)
            chaos.may_die()

        return wrapped

    for name in ("write_atomically", "write_spill"):
        patch.setattr(transforms, name, dying(getattr(transforms, name)))


@pytest.mark.parametrize(
    ("sampler", "blocks_per_file"),
    [
        # Shuffles that are repeated are made as those that are fresh.
        ("poisson", 1),
        ("truncated-poisson", 1),
        ("dynamic-shuffle", 2),
        ("truncated-cyclic-poisson", 1),
    ],
)
def test_retried_doubled_and_reordered_bundles_give_the_same_bytes(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch, sampler: str, blocks_per_file: int
) -> None:
    cap = needed(sampler, cap=11, bands=3)
    layout, dataset = jobs.layout(4, sampler=sampler, **cap), jobs.dataset
    key_file, whole = jobs.key_file, jobs.write("whole", layout)
    out, batches_id = jobs.open("o", layout)
    secrets = poisson_batching._secrets(layout, dataset, str(out), str(key_file))
    known = know_input(read_key_file(key_file), dataset)
    groups, blocks = tuple(range(layout.num_groups)), list(dataset.blocks)
    chaos = Chaos(seed=SAMPLERS.index(sampler))
    dying_writes(chaos, monkeypatch)
    folder, size = out / "private" / "spill", blocks_per_file
    folder.mkdir(mode=0o700)
    spill = Spill(folder=str(folder), num_threads=2, blocks_per_file=size)
    sample = transforms.SpillBlocksFn(layout, secrets, known, spill)
    files = [tuple(blocks[at : at + size]) for at in range(0, len(blocks), size)]
    done = chaos.shuffle(chaos.run(sample, files))
    gather = transforms._AwaitFn(len(blocks), groups)
    elements: list[Any] = chaos.run(gather, done)
    write = transforms.WriteSpilledFn(layout, str(out), len(blocks), spill)
    names = chaos.run(write, elements)
    assert sorted(names) == [layout.file(group).name for group in groups]
    # 10 bundles or more, twice, with three chances of 15 % or more in each attempt.
    assert chaos.deaths > 5
    finish_job(out, layout, dataset, batches_id)
    assert contents(out) == contents(whole)


# The command, short of disk, of input or of a sound worker.

#: In every row, and in nothing that a person or a log sees.
CANARY = 914827365564738291


def no_space(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def quoting_a_row(*_: object, **__: object) -> NoReturn:
    raise ValueError(f"a row holds {CANARY}")


def damage(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    # Another thread must find one of both files, never half of one.
    path.with_name(".damaged").write_bytes(data)
    path.with_name(".damaged").replace(path)


def before_reading(change: Callable[[pathlib.Path], None]) -> Callable[..., Any]:
    """Reads a block of a file that is changed before."""
    lock = threading.Lock()  # threads read blocks at once, and would write one name

    def read(block: Any, *arguments: Any) -> Any:
        with lock:
            change(pathlib.Path(block.path))
        return parquet_blocks.read_block(block, *arguments)

    return read


def lose(path: pathlib.Path) -> None:
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("module", "name", "fault", "message"),
    [
        (transforms, "write_spill", no_space, "No space left"),
        (transforms, "write_atomically", no_space, "No space left"),
        (PlanSampler, "choose", quoting_a_row, "ValueError"),
        (packing, "encode_batch", quoting_a_row, "ValueError"),
        (packing, "read_block", before_reading(lose), "to be readable"),
        (packing, "read_block", before_reading(damage), "and intact"),
    ],
    ids=["full in map", "full in reduce", "map dies", "reduce fails", "input lost",
         "input damaged"],
)  # fmt: skip
def test_a_fault_is_one_line_without_rows_and_the_job_goes_on(
    tmp_path: pathlib.Path,
    command: Command,
    key_file: pathlib.Path,
    module: Any,
    name: str,
    fault: Callable[..., Any],
    message: str,
) -> None:
    source, out = tmp_path / "a.parquet", tmp_path / "o"
    table = pa.table({"id": np.full(1000, CANARY)})
    pq.write_table(
        table, source, row_group_size=500, use_dictionary=False, write_statistics=False
    )
    sound = source.read_bytes()
    options = ["--input", source, "--out", out, "--key-file", key_file]
    options += ["--batch-size=250", "--epochs=1", "--sampler=poisson"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, fault)
        code, *_ = ran = command("batches", *options)
    errors = [line for line in ran.printed.splitlines() if "rror" in line]
    assert (code, len(errors)) == (2, 1), ran.printed
    assert errors[0].startswith("error: Expected"), ran.printed
    assert message in errors[0], ran.printed
    assert "Traceback" not in ran.printed
    key = read_key_file(key_file)
    for secret in (str(CANARY), hex(CANARY)[2:], key.hex(), str(key)):
        assert secret not in ran.printed
    assert not (out / "manifest.json").exists()
    source.write_bytes(sound)
    again = command("batches", *options)
    assert again.code == 0, again.printed
    assert verify(out).findings == ()
    told = [again.printed, *(out / name for name in contents(out) if "json" in name)]
    texts = [each if isinstance(each, str) else each.read_text() for each in told]
    assert len(texts) == 3
    for secret in (str(CANARY), key.hex(), str(key)):
        assert not any(secret in text for text in texts)


def as_hex(secret: bytes) -> bytes:
    return secret.hex().encode()


def as_list(secret: bytes) -> bytes:
    return str(list(secret)).encode()


def pipeline_bytes(pipeline: beam.Pipeline) -> bytes:
    """A pipeline's proto, and its DoFns as pickled: the proto holds them compressed."""
    proto = pipeline.to_runner_api()
    fns = []
    for transform in proto.components.transforms.values():
        if transform.spec.urn == common_urns.primitives.PAR_DO.urn:
            of_do = beam_runner_api_pb2.ParDoPayload
            payload = of_do.FromString(transform.spec.payload)
            data = base64.b64decode(payload.do_fn.payload)
            try:
                fns.append(bz2.decompress(data))
            except OSError:
                fns.append(zlib.decompress(data))
    return b"".join([proto.SerializeToString(), *fns])


@pytest.mark.parametrize("sampler", ["truncated-poisson", "dynamic-shuffle"])
def test_neither_key_nor_digests_nor_boundaries_are_in_pipeline_or_options(
    jobs: SmallJobs,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
) -> None:
    """A digest of column statistics lets a guess at a row be checked."""
    layout = jobs.layout(4, sampler=sampler)
    seen: list[bytes] = []

    def record(pipeline: beam.Pipeline, *_: object, **__: object) -> Any:
        seen.append(pipeline_bytes(pipeline))
        seen.append(str(pipeline.options.get_all_options()).encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(beam.Pipeline, "run", record)
    options = PipelineOptions(["--runner=BundleBasedDirectRunner"])
    with pytest.raises(KeyboardInterrupt):
        jobs.write("o", layout, options=options)
    key = read_key_file(jobs.key_file)
    digests = {*jobs.dataset.footers.values(), jobs.dataset.digest}
    assert len(digests) == 3
    secrets = [key, *map(bytes.fromhex, digests)]
    secrets += [f(secret) for secret in secrets for f in (as_hex, as_list)]
    if sampler == "dynamic-shuffle":
        kept = (jobs.folder / "o" / "private" / "starts").read_bytes()
        first = np.frombuffer(kept[:8], "<u8")
        secrets += [kept[:16], str(first[0]).encode()]
    assert len(seen) == 2
    for told in (str(jobs.key_file), "part-1.parquet"):
        assert told.encode() in seen[0], "the test does not see what workers get"
    for secret in secrets:
        assert not any(secret in text for text in seen)
