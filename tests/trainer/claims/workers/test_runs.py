"""Runs by several workers, which ``mpiexec`` started, and what ends them."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.engines.harness.polling import wait_for
from tests.trainer.conftest import make_rows
from tests.trainer.run.whole_runs import ONE_SECRET, same_results
from tests.warm_processes import warm_python
from trainer.cli.train_command import train_request
from trainer.core.run import session
from trainer.core.run.run_record import read_run
from trainer.train import train

pytest.importorskip("mpi4py", reason="no MPI: pip install mpi4py mpich")
ROOT = pathlib.Path(__file__).parents[4]
MPIEXEC = shutil.which("mpiexec", path=pathlib.Path(sys.executable).parent)
pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install mpich")

SETTINGS = [
    "--noise-multiplier=0.8", "--delta=1e-3", "--l2-norm-clip=1", "--embedding-dim=2",
    "--hidden=4", "--worker-timeout=120", "--batches-used-before",
]  # fmt: skip
#: A metric that tells of an evaluation, the first of which is before the first step.
TOLD = """
import pathlib

def mean(labels, predictions):
    pathlib.Path("evaluated").touch()
    return float(predictions.mean())
"""


#: A model whose table has fewer rows than one example asks for.
OWN_TABLES = """
import keras

def make(manifest):
    ids = keras.Input((26,), dtype="int32", name="categories")
    table = keras.layers.Embedding(1000, 1)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
"""


@pytest.fixture(autouse=True)
def of_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs in this process, as of those that ``start`` starts."""
    monkeypatch.setattr(session, "new_secret", lambda: ONE_SECRET)


@pytest.fixture
def arguments(batch_folder: Any, held_out: Any, tmp_path: pathlib.Path) -> Any:
    """``arguments(run, batches)`` of `dpsgd train`: steps of three parts, one empty."""
    sizes = [40, 9, 0, 48, 17, 33, 48, 2]
    folder = batch_folder(
        [make_rows(size, seed) for seed, size in enumerate(sizes)],
        expected_batch_size=24,
        truncated_batch_size=48,
    )

    def make(run: str, batches: Any = folder.path) -> list[str]:
        return [
            f"--batches={batches}", f"--eval={held_out}", *SETTINGS,
            f"--out={tmp_path / run}",
        ]  # fmt: skip

    return make


#: ``dpsgd`` with a secret of its chief that the test knows.
DPSGD = f"""
from dpsgd.__main__ import main
from trainer.core.run import session

session.new_secret = lambda: {ONE_SECRET}
main()
"""


def start(arguments: list[str], count: int) -> subprocess.Popen[str]:
    """Starts workers."""
    assert MPIEXEC is not None
    command = [warm_python(), "-c", DPSGD, "train", *arguments]
    return subprocess.Popen(
        [MPIEXEC, "-n", str(count), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(job: subprocess.Popen[str], status: int = 0) -> str:
    """Returns the standard error of a job that ends with the expected status."""
    _, errors = job.communicate(timeout=600)
    assert job.returncode == status, errors
    return errors


def test_two_workers_train_what_one_does(
    arguments: Any, tmp_path: pathlib.Path
) -> None:
    train(train_request(arguments("one")))
    finish(start(arguments("two"), 2))
    assert same_results(tmp_path / "one", tmp_path / "two", claims=False)


@pytest.mark.thorough
def test_three_workers_stop_together_and_go_on_as_two(
    arguments: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told.py").write_text(TOLD)
    told, metric = tmp_path / "evaluated", ["--eval-every=1", "--metric=told:mean"]
    train(train_request([*arguments("one"), *metric]))
    told.unlink()
    given = [*arguments("several"), *metric]
    job = start(given, 3)
    wait_for("a step", lambda: told.exists() or job.poll() is not None, 300)
    job.send_signal(signal.SIGTERM)
    errors = finish(job, 128 + signal.SIGTERM)
    assert errors.count("error: ") == 1
    assert "error: Stopped after step" in errors
    errors = finish(start(given, 2))
    assert "continuing after step" in errors
    assert "workers" in read_run(tmp_path / "several")[0].relies_on
    assert same_results(tmp_path / "one", tmp_path / "several", claims=False)


@pytest.mark.thorough
@pytest.mark.parametrize("noise", ["dense", "lazy"])
def test_an_error_of_values_at_one_worker_ends_the_run_of_all_for_good(
    noise: str, arguments: Any, batch_folder: Any, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: the others were lost, as if by a network, and could go on."""
    steps = [make_rows(48, seed) for seed in range(3)]
    steps[1]["categories"][20] = 2**30  # a row of the second of three parts
    bad = batch_folder(steps, "bad", expected_batch_size=24, truncated_batch_size=48)
    given = [*arguments("bad-run", bad.path), f"--embedding-noise={noise}"]
    given += ["--optimizer=sgd", "--checkpoint-every=1", "--model=tables:make"]
    (tmp_path / "tables.py").write_text(OWN_TABLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        errors = finish(start(given, 2), 2)
        assert errors.count("error: ") == 1
        assert "is withheld" in errors
        for count in (2, 1):
            errors = finish(start(given, count), 2)
            assert "ended for good at step 1" in errors
    assert not read_run(tmp_path / "bad-run")[0].complete


@pytest.fixture
def ranges_asked(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, int, int]]:
    """(name, first byte, last byte) of each range that the store was asked for."""
    del s3_bucket  # it is asked from other processes, and answers in this one
    server = pytest.importorskip("moto.server").DomainDispatcherApplication
    answer, asked = server.__call__, []

    def recording(self: Any, environ: dict[str, Any], *rest: Any) -> Any:
        if given := environ.get("HTTP_RANGE"):
            first, last = map(int, given.removeprefix("bytes=").split("-"))
            name = environ["PATH_INFO"].rpartition("/")[2]
            asked.append((name, first, last))
        return answer(self, environ, *rest)

    monkeypatch.setattr(server, "__call__", recording)
    return asked


@pytest.mark.thorough
def test_two_workers_train_from_a_store_what_one_does_from_a_folder(
    arguments: Any,
    s3_bucket: str,
    ranges_asked: list[tuple[str, int, int]],
    tmp_path: pathlib.Path,
) -> None:
    train(train_request(arguments("one")))
    client = pytest.importorskip("boto3").client("s3")
    for path in (tmp_path / "batches").rglob("*.*"):
        client.upload_file(str(path), "bucket", str(path.relative_to(tmp_path)))
    finish(start(arguments("two", f"{s3_bucket}/batches"), 2))
    assert same_results(tmp_path / "one", tmp_path / "two", claims=False)
    # The two read each byte once, together.
    files = sorted((tmp_path / "batches").glob("*.tfrecord"))
    wanted = [(f.name, at) for f in files for at in range(f.stat().st_size)]
    found = sorted((name, at) for name, a, b in ranges_asked for at in range(a, b + 1))
    assert found == wanted
    changed = bytearray(files[0].read_bytes())
    changed[len(changed) // 2] ^= 1
    client.put_object(Bucket="bucket", Key=f"batches/{files[0].name}", Body=changed)
    errors = finish(start(arguments("three", f"{s3_bucket}/batches"), 2), 2)
    assert f"{files[0].name} to be as it was written; it was changed" in errors
    assert not (tmp_path / "three" / "metrics.json").exists()


PROGRAM = str(pathlib.Path(__file__).parent / "program.py")


def run(name: str, *, count: int = 2, timeout: int = 60) -> tuple[int, str, list[str]]:
    """Exit status, output and lines of error of a function of ``program``."""
    assert MPIEXEC is not None
    done = subprocess.run(
        [MPIEXEC, "-n", str(count), sys.executable, PROGRAM, name, str(timeout)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return done.returncode, done.stdout, errors


def test_sums_are_exact_and_values_come_by_rank() -> None:
    assert run("exchange", count=3) == (0, "exchanged\n", [])


@pytest.mark.thorough
def test_workers_of_one_host_listen_on_loopback_alone() -> None:
    assert run("listen") == (0, "127.0.0.1\n", [])


def test_an_error_that_all_know_of_is_said_once() -> None:
    status, _, [error] = run("refuse")
    assert status == 2
    assert error.startswith("error: worker 1 on ")
    assert error.endswith(": Expected a file.")


def test_a_signal_that_comes_late_changes_no_agreed_stop() -> None:
    """Seen to fail: the worker was killed by it, and the status was 15."""
    assert run("signal_late") == (128 + signal.SIGTERM, "", [])


def test_a_worker_that_hangs_is_named_and_ends_all() -> None:
    status, _, [error] = run("hang", count=3)
    assert status
    assert "Expected all 3 workers within 1 seconds; worker 2 on " in error


def test_a_worker_that_is_done_waits_for_the_chief_without_a_limit() -> None:
    assert run("finish") == (0, "finished\n", [])


@pytest.mark.thorough
def test_an_error_of_one_worker_ends_all() -> None:
    assert run("fail")[::2] == (2, ["error: Expected a batch."])


@pytest.mark.thorough
def test_a_worker_that_is_killed_ends_all() -> None:
    status, _, errors = run("killed")
    assert status
    assert not errors


@pytest.mark.thorough
def test_a_worker_that_never_starts_is_an_error_of_those_that_did() -> None:
    status, _, [error] = run("late", timeout=5)
    assert status
    assert "Expected all 2 workers to start within 5 seconds" in error
