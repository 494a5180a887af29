"""Hosts on one machine: apart, pinned, and gone when the context ends."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from accounting.core.validation import InputError
from tests.engines.harness import hosts as module
from tests.engines.harness.cluster import children
from tests.engines.harness.hosts import HEAD, Hosts, make_hosts, remove_stale
from tests.engines.harness.polling import wait_for

SERVE = [sys.executable, "-m", "http.server", "8000"]
#: Starts a process of its own group, which nobody waits for, and stays.
LEAVE = [sys.executable, "-c", "import subprocess, time;"
         "subprocess.Popen(['sleep', '600'], start_new_session=True);"
         "print('left', flush=True); time.sleep(600)"]  # fmt: skip


@pytest.fixture(scope="module")
def _namespaces() -> None:
    if reason := module.why_no_namespaces():
        pytest.skip(reason)


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


@pytest.mark.usefixtures("_namespaces")
def test_every_host_has_its_own_ports(tmp_path: pathlib.Path) -> None:
    (tmp_path / "served").write_text("[1]")
    with make_hosts(2, tmp_path) as hosts:
        for worker in hosts.workers:  # the same port, on each
            command = [*SERVE, "--directory", str(tmp_path)]
            hosts.start(worker, "serve", command, os.environ)
        for worker in hosts.workers:
            url = f"http://{hosts.address(worker)}:8000/served"
            assert wait_for("a server", lambda url=url: hosts.get(url)) == [1]
        assert hosts.get(f"http://{hosts.address(HEAD)}:8000/served") is None


@pytest.mark.usefixtures("_namespaces")
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_however_it_ends(
    tmp_path: pathlib.Path, error: type[BaseException] | None
) -> None:
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


@pytest.mark.usefixtures("_namespaces")
def test_what_a_dead_program_left_is_removed() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    namespace = f"dpsgd-{dead.pid}-head"
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    command = ["ip", "netns", "exec", namespace, "sleep", "600"]
    orphan = subprocess.Popen(command, start_new_session=True)
    wait_for("the orphan to move in", lambda: module._inhabitants(namespace))
    mine = f"dpsgd-{os.getpid()}-probe"
    subprocess.run(["ip", "netns", "add", mine], check=True)
    try:
        remove_stale()
        assert orphan.wait() < 0
        assert namespace not in names()
        assert mine in names()
    finally:
        subprocess.run(["ip", "netns", "delete", mine], check=True)


def test_without_namespaces_there_is_one_host(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "why_no_namespaces", lambda: "no root")
    core = min(os.sched_getaffinity(0))
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    with make_hosts(2, tmp_path, cores=[core]) as hosts:
        assert type(hosts) is Hosts
        (worker,) = hosts.workers
        process = hosts.start(worker, "show", [sys.executable, "-c", show], os.environ)
        assert process.wait() == 0
    assert process.log.read_text().strip() == f"[{core}]"


def test_killing_takes_what_was_started_too(tmp_path: pathlib.Path) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']);\
print('left', flush=True); time.sleep(600)"
    hosts = Hosts(1, tmp_path)
    process = hosts.start("worker0", "nest", [sys.executable, "-c", code], os.environ)
    wait_for("its child", lambda: process.log.read_text().startswith("left"))
    (child,) = children(process.pid)
    process.kill()
    assert not process.running()
    wait_for("the end of its child", lambda: not alive(child))


def test_a_condition_that_does_not_come_is_an_error() -> None:
    with pytest.raises(InputError, match=re.escape("Expected rain within 0 seconds.")):
        wait_for("rain", lambda: False, seconds=0)
