"""The request that Dataflow would get, built without a network, and what it carries.

Needs ``apache-beam[gcp]``; where that is absent the tests skip.  No job was ever run on
Dataflow: what stands behind the cloud's door is not tested here.
"""

from __future__ import annotations

import base64
import json
import pathlib
import subprocess
import sys
import tarfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from accounting.core.plan import DpSgdPlan
from pipelines.files.key_files import create_key_file
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout

apiclient = pytest.importorskip(
    "apache_beam.runners.dataflow.internal.apiclient",
    reason="needs apache-beam[gcp], which no lock file holds",
    exc_type=ImportError,
)


class SubmittedError(Exception):
    """The request is complete; the next thing would be the network."""


class Request:
    """What would go to Google: staged files by name, and the job."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.job: Any = None

    @property
    def pipeline(self) -> Any:
        return beam_runner_api_pb2.Pipeline.FromString(self.files["pipeline.pb"])

    @property
    def functions(self) -> list[bytes]:
        """The pickled DoFns, in the encoding of the proto."""
        payloads = [
            beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload)
            for transform in self.pipeline.components.transforms.values()
            if transform.spec.urn == common_urns.primitives.PAR_DO.urn
        ]
        return [payload.do_fn.payload for payload in payloads]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An input of 40 rows and a key."""
    root = tmp_path_factory.mktemp("dataflow")
    (root / "input").mkdir()
    table = pa.table({"id": np.arange(40), "f": np.arange(40, dtype="f4")})
    pq.write_table(table, root / "input" / "a.parquet", row_group_size=20)
    create_key_file(root / "sampling.key")
    return root


@pytest.fixture(scope="module")
def request_of(folder: pathlib.Path, root: pathlib.Path) -> Callable[..., Request]:
    """Builds the request of a small job."""

    def build(*more: str) -> Request:
        dataset = list_blocks(str(folder / "input"))
        plan = DpSgdPlan(
            sampler="poisson", num_examples=40, expected_batch_size=10, num_steps=4
        )
        found = Request()

        def stage(_: Any, __: str, name: str, stream: Any, *___: Any, **____: Any):
            data = stream if isinstance(stream, str) else stream.read()
            content = pathlib.Path(data).read_bytes() if isinstance(data, str) else data
            found.files[name] = content

        def submit(_: Any, job: Any) -> None:
            found.job = job
            raise SubmittedError

        options = [
            "--runner=DataflowRunner", "--project=project", "--region=europe-west1",
            "--temp_location=gs://bucket/temp", "--no_auth", "--job_name=batches",
            *more,
        ]  # fmt: skip
        client = apiclient.DataflowApplicationClient
        out = folder / f"out-{len(list(folder.glob('out-*')))}"
        with pytest.MonkeyPatch.context() as patch:
            # Both would ask Google: about the bucket, and for credentials.
            patch.setattr(
                GoogleCloudOptions, "_warn_if_soft_delete_policy_enabled",
                lambda *_: None,
            )  # fmt: skip
            patch.setattr(apiclient, "create_storage_client", lambda *_: None)
            patch.setattr(client, "stage_file_with_retry", stage)
            patch.setattr(client, "stage_file", stage)
            patch.setattr(client, "submit_job_description", submit)
            with pytest.raises(Exception, match="SubmittedError"):
                write_batches(
                    dataset=dataset, layout=make_layout(plan, dataset), out=out,
                    key_file=folder / "sampling.key", options=PipelineOptions(options),
                )  # fmt: skip
        return found

    return build


@pytest.fixture(scope="module")
def staged(request_of: Callable[..., Request], root: pathlib.Path) -> Request:
    """The request with the package beside Beam's own container."""
    return request_of(f"--setup_file={root / 'setup.py'}")


def plain(payload: bytes) -> bytes:
    """A pickled DoFn out of the proto, which holds it compressed."""
    import bz2
    import contextlib
    import zlib

    data = base64.b64decode(payload)
    with contextlib.suppress(OSError):
        return bz2.decompress(data)
    return zlib.decompress(data)


def test_no_key_is_in_the_request_or_in_a_staged_file(
    staged: Request, folder: pathlib.Path
) -> None:
    text = (folder / "sampling.key").read_text().strip()
    key = bytes.fromhex(text)
    carried = [*staged.files.values(), staged.job.json().encode()]
    carried += [plain(payload) for payload in staged.functions]
    location = str(folder / "sampling.key").encode()
    assert any(location in data for data in carried), "the test sees what workers get"
    spellings = {
        key, text.encode(), text.upper().encode(), base64.b64encode(key),
        base64.urlsafe_b64encode(key), base64.b64encode(text.encode()),
        str(key).encode(), str(list(key)).encode(),
    }  # fmt: skip
    for data in carried:
        assert not any(spelling in data for spelling in spellings)


def test_the_job_names_its_place_its_image_and_its_package(staged: Request) -> None:
    job = json.loads(staged.job.json())
    assert job["name"] == "batches"
    assert job["type"] == "JOB_TYPE_BATCH"
    options = staged.job.options.get_all_options(drop_default=True)
    assert options["project"] == "project"
    assert options["region"] == "europe-west1"
    (environment,) = {
        environment.payload: environment
        for environment in staged.pipeline.components.environments.values()
    }.values()
    assert environment.urn == common_urns.environments.DOCKER.urn
    assert "workflow.tar.gz" in staged.files


def test_a_container_of_your_own_needs_no_package(
    request_of: Callable[..., Request],
) -> None:
    image = "europe-docker.pkg.dev/project/dpsgd/worker:0.2.0"
    made = request_of(f"--sdk_container_image={image}", "--sdk_location=container")
    payloads = {
        beam_runner_api_pb2.DockerPayload.FromString(e.payload).container_image
        for e in made.pipeline.components.environments.values()
    }
    assert payloads == {image}
    assert "workflow.tar.gz" not in made.files


_WORKER = """
import importlib.abc, sys
sys.path.insert(0, sys.argv[1])
FORBIDDEN = ("tensorflow", "keras", "tensorflow_privacy", "trainer")
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from apache_beam.internal import pickler
loaded = [pickler.loads(bytes.fromhex(line)) for line in sys.stdin]
import pipelines
assert pipelines.__file__.startswith(sys.argv[1]), pipelines.__file__
from pipelines.inputs.parquet_blocks import list_blocks
# A DoFn travels with its arguments and windowing, as a tuple that begins with it.
fns = [value[0] if isinstance(value, tuple) else value for value in loaded]
(fn,) = [fn for fn in fns if type(fn).__name__ == "_SampleBlockFn"]
assert any(type(fn).__name__ == "_WriteGroupFn" for fn in fns)
fn.setup()
block = list_blocks(sys.argv[2]).blocks[0]
print("BYTES", sum(len(data) for _, (_, data) in fn.process(block)))
assert not set(FORBIDDEN) & {name.split(".")[0] for name in sys.modules}
"""


def test_workers_run_from_what_is_staged_without_tensorflow(
    staged: Request, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Unpickles every DoFn and samples a block, from the staged package alone."""
    archive = tmp_path / "workflow.tar.gz"
    archive.write_bytes(staged.files["workflow.tar.gz"])
    with tarfile.open(archive) as package:
        package.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    result = subprocess.run(
        [sys.executable, "-I", "-c", _WORKER, str(unpacked), str(folder / "input")],
        input="\n".join(payload.hex() for payload in staged.functions),
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    # 20 rows x 4 steps x q = 1/4 gives about 20 participations of 24 bytes.
    assert 24 < int(result.stdout.split("BYTES")[1]) < 24 * 80
