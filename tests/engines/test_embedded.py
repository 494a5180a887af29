"""Flink and Spark, each whole in one process: the same bytes, errors and resuming.

Who chooses rows knows no engine: two samplers are sampled here, one with a cap and one
with epochs, and all of them on the clusters of ``make engines``.
"""

from __future__ import annotations

import functools
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

from accounting.core.plan import BALLS_AND_BINS, POISSON, TRUNCATED_POISSON
from accounting.core.validation import InputError
from pipelines.batches.verify import verify
from pipelines.core.users import UserBound
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job.engine_tasks import run_on_engine
from pipelines.job.packing import Layout
from pipelines.job.poisson_batching import write_batches
from pipelines.job.runtime import Runtime
from pipelines.tables.prepare import TableOptions, UserOptions, prepare
from pipelines.tables.synthetic import SynthOptions, write_synth
from tests.criteo import criteo_schema
from tests.engines.harness import parts
from tests.engines.harness.embedded import RUNNERS
from tests.engines.harness.polling import wait_for
from tests.pipelines.conftest import contents, write_text
from tests.pipelines.waiting_job import waiting_job

# Threads that served an engine end with an exception when it hangs up.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)

LayoutOf = Callable[[str], Layout]
LocalBatches = Callable[[str], pathlib.Path]


@pytest.mark.parametrize("sampler", [TRUNCATED_POISSON, BALLS_AND_BINS])
def test_bytes_are_those_of_the_local_runner(
    sampler: str,
    engine_options: list[str],
    dataset: Dataset,
    layout_of: LayoutOf,
    sampling_key: pathlib.Path,
    local_batches: LocalBatches,
    tmp_path: pathlib.Path,
) -> None:
    write_batches(
        dataset=dataset,
        layout=layout_of(sampler),
        out=tmp_path / "out",
        key_file=sampling_key,
        options=PipelineOptions(engine_options),
    )
    assert not verify(tmp_path / "out").findings
    assert contents(tmp_path / "out") == contents(local_batches(sampler))


def test_bounded_users_are_those_of_this_process(
    engine_options: list[str], sampling_key: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    users = SynthOptions(num_rows=20_000, rows_per_user=5)
    source = str(write_synth(tmp_path / "text", users))
    options = TableOptions(schema=criteo_schema().with_user("user"))
    settings = UserBound(
        user_column="user", max_examples_per_user=3, num_examples=20_000
    )
    how = UserOptions(settings=settings, key_file=sampling_key)
    prepare(source, tmp_path / "here", options, users=how)
    engine = functools.partial(run_on_engine, PipelineOptions(engine_options))
    there = Runtime(run_tasks=engine)
    prepare(source, tmp_path / "there", options, users=how, runtime=there)
    found = contents(tmp_path / "there")
    assert found == contents(tmp_path / "here")
    assert "train/part-00000.parquet" in found


def test_prepared_files_are_those_of_this_process(
    engine_options: list[str], tmp_path: pathlib.Path
) -> None:
    write_text(tmp_path / "text", 20_000, 5)
    options = TableOptions(schema=criteo_schema(), row_group_rows=100)
    source = str(tmp_path / "text")
    wanted = prepare(source, tmp_path / "here", options)
    engine = functools.partial(run_on_engine, PipelineOptions(engine_options))
    there = Runtime(run_tasks=engine)
    found = prepare(source, tmp_path / "there", options, runtime=there)
    assert found == wanted
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_the_command_starts_and_stops_an_engine_by_itself(
    engine: str, dataset: Dataset, tmp_path: pathlib.Path
) -> None:
    source = pathlib.Path(dataset.blocks[0].path).parent
    command = [sys.executable, "-m", "dpsgd", "batches", "--input", str(source),
               "--batch-size", "500", "--num-steps", "40", "--sampler", POISSON,
               "--key-file", str(tmp_path / "key")]  # fmt: skip
    options = [f"--runner={RUNNERS[engine]}", "--environment_type=LOOPBACK",
               f"--{engine}_job_server_jar={parts.job_server(engine)}"]  # fmt: skip
    run_command([*command, "--out", str(tmp_path / "local")])
    errors = run_command([*command, *options, "--out", str(tmp_path / "engine")])
    assert contents(tmp_path / "engine") == contents(tmp_path / "local")
    assert "Traceback" not in errors


def run_command(command: list[str]) -> str:
    """Runs a command that must succeed; returns what it wrote to standard error."""
    result = subprocess.run(
        command, cwd=parts.ROOT, env=parts.environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_an_error_of_a_worker_is_one_line_and_the_next_run_resumes(
    engine_options: list[str],
    dataset: Dataset,
    layout_of: LayoutOf,
    sampling_key: pathlib.Path,
    local_batches: LocalBatches,
    tmp_path: pathlib.Path,
) -> None:
    layout, out = layout_of(POISSON), tmp_path / "out"
    obstacle = out / layout.file(layout.num_groups - 1).name

    def job() -> None:
        write_batches(
            dataset=dataset,
            layout=layout,
            out=out,
            key_file=sampling_key,
            options=PipelineOptions(engine_options),
        )

    with pytest.MonkeyPatch.context() as patch:
        # The folder must be new when it is looked at: the obstacle comes right after.
        from pipelines.job import job_folder

        opened = job_folder.open_job

        def open_and_obstruct(*arguments: object) -> object:
            result = opened(*arguments)
            obstacle.mkdir()
            return result

        patch.setattr(job_folder, "open_job", open_and_obstruct)
        with pytest.raises(InputError, match=r"^Expected files to be written") as error:
            job()
    assert "\n" not in str(error.value)
    written = {path.name: path.stat().st_ino for path in out.glob("batches-*")}
    obstacle.rmdir()
    job()
    assert contents(out) == contents(local_batches(POISSON))
    kept = [name for name, inode in written.items() if name != obstacle.name
            and (out / name).stat().st_ino == inode]  # fmt: skip
    assert len(kept) == len(written) - 1, "a finished file was made again"


def states_of_jobs(options: list[str]) -> list[str]:
    """The state of every job that a job server was ever given."""
    (endpoint,) = [o.partition("=")[2] for o in options if "--job_endpoint" in o]
    with grpc.insecure_channel(endpoint) as channel:
        service = beam_job_api_pb2_grpc.JobServiceStub(channel)
        jobs = service.GetJobs(beam_job_api_pb2.GetJobsRequest()).job_info
    return [beam_job_api_pb2.JobState.Enum.Name(job.state) for job in jobs]


def test_a_stopped_command_cancels_its_job_and_is_finished_by_the_next(
    engine_options: list[str], dataset: Dataset, tmp_path: pathlib.Path
) -> None:
    arguments = ["batches", "--batch-size", "500", "--num-steps", "40",
                 "--input", str(pathlib.Path(dataset.blocks[0].path).parent),
                 "--out", str(tmp_path / "out"), *engine_options]  # fmt: skip
    with waiting_job(arguments, parts.ROOT, parts.environment()) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM
    assert "error: Stopped by a signal. Give the same command again" in errors, errors
    assert "Traceback" not in errors, errors
    wait_for(
        "the job to be cancelled",
        lambda: states_of_jobs(engine_options).count("CANCELLED") == 1,
    )
    run_command([sys.executable, "-m", "dpsgd", *arguments])
    assert not verify(tmp_path / "out").findings


def test_an_engine_that_cannot_be_had_is_one_line(
    engine: str,
    dataset: Dataset,
    layout_of: LayoutOf,
    tmp_path: pathlib.Path,
) -> None:
    options = [f"--runner={RUNNERS[engine]}", f"--{engine}_job_server_jar=/none.jar"]
    with pytest.raises(InputError, match=r"^Expected the engine.*/none.jar") as error:
        write_batches(
            dataset=dataset,
            layout=layout_of(POISSON),
            out=tmp_path / "out",
            options=PipelineOptions(options),
        )
    assert "\n" not in str(error.value)
