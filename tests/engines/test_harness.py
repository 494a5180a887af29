"""The harness leaves nothing behind, and refuses other bytes and wasted memory."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import yaml

from accounting.core.validation import InputError
from tests.engines.harness import hosts as module
from tests.engines.harness.__main__ import _refuse_differences, _refuse_waste
from tests.engines.harness.cluster import children
from tests.engines.harness.faults import Record
from tests.engines.harness.flink import CONFIG, memory_options
from tests.engines.harness.hosts import make_hosts
from tests.engines.harness.jobs import Outcome
from tests.engines.harness.polling import wait_for
from tests.engines.harness.report import Row

#: Starts a process of its own group, which nobody waits for, and stays.
LEAVE = [sys.executable, "-c", "import subprocess, time;"
         "subprocess.Popen(['sleep', '600'], start_new_session=True);"
         "print('left', flush=True); time.sleep(600)"]  # fmt: skip


def names() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True
    ).stdout


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_however_it_ends(
    tmp_path: pathlib.Path, error: type[BaseException] | None
) -> None:
    if reason := module.why_no_namespaces():
        pytest.skip(reason)

    def use() -> None:
        with make_hosts(1, tmp_path) as hosts:
            process = hosts.start(hosts.workers[0], "leave", LEAVE, os.environ)
            wait_for("its child", lambda: process.log.read_text().startswith("left"))
            pids.extend([process.pid, *children(process.pid)])
            assert all(map(alive, pids))
            assert str(os.getpid()) in names()
            if error:
                raise error

    pids: list[int] = []
    if error:
        with pytest.raises(error):
            use()
    else:
        use()
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert f"dpsgd-{os.getpid()}-" not in names()


def row(
    *, identical: bool = True, survived: bool = True, peak_bytes: int = 1 << 20
) -> Row:
    record = Record(
        engine="flink",
        part="pool of worker1",
        pid=7,
        phase="writing",
        time="12:00:00",
        files=1,
        total_files=17,
        outcome=Outcome(seconds=5.0, identical=survived),
    )
    return Row(
        engine="flink",
        mode="cluster, 2 workers",
        rows_per_second=1234.5,
        identical=[True, identical],
        faults=[record],
        peak_bytes=peak_bytes,
        allowed_bytes=2 << 20,
    )


@pytest.mark.parametrize("fault", ["identical", "survived"])
def test_a_difference_is_an_error(fault: str) -> None:
    _refuse_differences([row()])
    with pytest.raises(InputError, match="the bytes of the local runner"):
        _refuse_differences([row(**{fault: False})])


def test_a_worker_above_its_memory_is_an_error() -> None:
    _refuse_waste([row(peak_bytes=2 << 20)])
    with pytest.raises(InputError, match="within 2 MiB"):
        _refuse_waste([row(peak_bytes=(2 << 20) + 1)])


def test_the_memory_of_a_taskmanager_adds_up() -> None:
    """Flink refuses to start unless Java's limits are those of the configuration."""
    options = memory_options(yaml.safe_load(CONFIG.read_text()))
    assert f"-Xmx{512 << 20}" in options  # 384 + 128
    assert f"-XX:MaxDirectMemorySize={256 << 20}" in options  # 64 + 128 + 64
    assert f"-XX:MaxMetaspaceSize={256 << 20}" in options
