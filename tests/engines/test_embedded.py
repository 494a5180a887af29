"""Flink and Spark, each whole in one process: the same bytes, errors and resuming."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.plan import POISSON, SAMPLERS
from accounting.validation import InputError
from deploy.engines import parts
from deploy.engines.comparing import same_bytes
from deploy.engines.embedded import RUNNERS
from pipelines.packing import Layout
from pipelines.parquet_blocks import Dataset
from pipelines.poisson_batching import write_batches
from pipelines.verify import verify

# Threads that served an engine end with an exception when it hangs up.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)

LayoutOf = Callable[[str], Layout]
LocalBatches = Callable[[str], pathlib.Path]


@pytest.mark.parametrize("sampler", SAMPLERS)
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
    assert same_bytes(tmp_path / "out", local_batches(sampler))


def test_same_bytes_sees_a_difference(
    local_batches: LocalBatches, tmp_path: pathlib.Path
) -> None:
    folder = local_batches(POISSON)
    copy = pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))
    assert same_bytes(copy, folder)
    path = min(copy.glob("batches-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not same_bytes(copy, folder)
    path.unlink()
    assert not same_bytes(copy, folder)
    assert not same_bytes(folder, copy)


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
    assert same_bytes(tmp_path / "engine", tmp_path / "local")
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
        from pipelines import poisson_batching as module

        opened = module.open_job

        def open_and_obstruct(*arguments: object) -> object:
            result = opened(*arguments)
            obstacle.mkdir()
            return result

        patch.setattr(module, "open_job", open_and_obstruct)
        with pytest.raises(InputError, match=r"^Expected files to be written") as error:
            job()
    assert "\n" not in str(error.value)
    written = {path.name: path.stat().st_ino for path in out.glob("batches-*")}
    obstacle.rmdir()
    job()
    assert same_bytes(out, local_batches(POISSON))
    kept = [name for name, inode in written.items() if name != obstacle.name
            and (out / name).stat().st_ino == inode]  # fmt: skip
    assert len(kept) == len(written) - 1, "a finished file was made again"


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
