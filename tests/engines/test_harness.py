"""The harness leaves nothing behind, and refuses other bytes and wasted memory."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.engines.harness import hosts as module
from tests.engines.harness.cluster import children
from tests.engines.harness.hosts import make_hosts
from tests.engines.harness.polling import wait_for

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


def test_nothing_is_left_when_it_is_interrupted(tmp_path: pathlib.Path) -> None:
    if reason := module.why_no_namespaces():
        pytest.skip(reason)
    pids: list[int] = []

    def use() -> None:
        with make_hosts(1, tmp_path) as hosts:
            process = hosts.start(hosts.workers[0], "leave", LEAVE, os.environ)
            wait_for("its child", lambda: process.log.read_text().startswith("left"))
            pids.extend([process.pid, *children(process.pid)])
            assert all(map(alive, pids))
            assert str(os.getpid()) in names()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert f"dpsgd-{os.getpid()}-" not in names()
