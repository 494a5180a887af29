"""Hosts of a cluster on one machine, and the processes on them.

A host is a network namespace with its own loopback.  Each has its own pool of Python
workers at ``localhost:50000``: two hosts that share a pool deadlock.  One more
namespace, the switch, has a bridge that connects the hosts.  All share one file system.
The head runs masters and clients.  Without the right to make namespaces, the machine
itself is both the head and the only worker.

Formal guarantees:
  - When the context ends, also by an error, no process of a host still runs, nor its
    children, and no namespace is left.
  - The next program removes what an interrupted one left.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError
from tests.engines.harness import parts
from tests.engines.harness.polling import wait_for

HEAD = "head"
_PREFIX = "dpsgd"
_CLONE_NEWNET = 0x40000000


class Process:
    """A program on a host, and its children in the same process group.

    Attributes:
      name: For messages and for the name of its log.
      host: Where it runs.
      pid: Its process id.
      log: File of its output.
    """

    def __init__(
        self, name: str, host: str, process: subprocess.Popen[bytes], log: pathlib.Path
    ) -> None:
        self.name = name
        self.host = host
        self.pid = process.pid
        self.log = log
        self._process = process

    def running(self) -> bool:
        """Returns whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kills its process group with SIGKILL, and waits for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        """Waits for its end; returns the exit status."""
        return self._process.wait()


class Hosts:
    """The head and one worker, both of them this machine itself.

    Args:
      num_workers: Number of worker hosts; must be 1, see ``make_hosts``.
      logs: Folder for the output of processes.
      cores: Core number to which each worker is pinned; empty to pin none.
    """

    def __init__(
        self, num_workers: int, logs: pathlib.Path, cores: Sequence[int] = ()
    ) -> None:
        self.workers = [f"worker{number}" for number in range(num_workers)]
        self._logs = logs
        self._cores = dict(zip(self.workers, cores, strict=False))
        self._processes: list[Process] = []

    def address(self, host: str) -> str:
        """Returns the address of ``host`` for other hosts."""
        del host
        return "127.0.0.1"

    def entrance(self, host: str) -> list[str]:
        """Returns the command that runs another, which follows it, on ``host``."""
        return [*self._enter(host), *self._pin(host)]

    def start(
        self,
        host: str,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
    ) -> Process:
        """Starts a program on a host, as the leader of a process group.

        Args:
          host: The head or a worker.
          name: For messages and for the name of its log.
          command: Program and arguments.
          env: All its environment variables.
        """
        log = self._logs / f"{host}-{name}.log"
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [*self.entrance(host), *command],
                env=dict(env),
                cwd=parts.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        started = Process(name, host, process, log)
        self._processes.append(started)
        return started

    def get(self, url: str, method: str = "GET", data: bytes | None = None) -> Any:
        """Returns a server's JSON answer to the head, or None without one.

        Args:
          url: Of the server.
          method: Of HTTP.
          data: Body of the request.
        """
        request = urllib.request.Request(url, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return json.loads(response.read() or b"{}")
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Kills every process on the hosts."""
        for process in reversed(self._processes):
            process.kill()

    def _enter(self, host: str) -> list[str]:
        del host
        return []

    def _pin(self, host: str) -> list[str]:
        if host not in self._cores:
            return []
        return ["taskset", "--cpu-list", str(self._cores[host])]


class Namespaces(Hosts):
    """The head and the workers, each a network namespace; see ``Hosts``."""

    def __init__(
        self, num_workers: int, logs: pathlib.Path, cores: Sequence[int] = ()
    ) -> None:
        super().__init__(num_workers, logs, cores)
        self._numbers = {name: n for n, name in enumerate([HEAD, *self.workers], 1)}
        remove_stale()
        self._client = concurrent.futures.ThreadPoolExecutor(1)
        try:
            self._join()
        except BaseException:
            self.close()
            raise
        self._client.submit(_enter_thread, self._namespace(HEAD)).result()

    def address(self, host: str) -> str:
        return f"10.77.0.{self._numbers[host]}"

    def get(self, url: str, method: str = "GET", data: bytes | None = None) -> Any:
        # In a thread of its own: a thread cannot leave a namespace that it entered.
        return self._client.submit(super().get, url, method, data).result()

    def close(self) -> None:
        super().close()
        self._client.shutdown()
        for name in [*self._numbers, "switch"]:
            _remove(self._namespace(name))

    def _namespace(self, host: str) -> str:
        return f"{_PREFIX}-{os.getpid()}-{host}"

    def _enter(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(host)]

    def _join(self) -> None:
        switch = self._namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host, number in self._numbers.items():
            namespace, port = self._namespace(host), f"port{number}"
            _ip("netns", "add", namespace)
            _ip("link", "add", "eth0", "netns", namespace, "type", "veth",
                "peer", "name", port, "netns", switch)  # fmt: skip
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{self.address(host)}/24",
                "dev", "eth0")  # fmt: skip
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")


def why_no_namespaces() -> str | None:
    """Returns why this machine cannot make namespaces, or None if it can."""
    if os.geteuid():
        return "namespaces need root"
    if not shutil.which("ip"):
        return "no `ip`: apt-get install iproute2"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "bridge", "type", "bridge")
    except InputError as error:
        return str(error)
    finally:
        _remove(name)
    return None


@contextlib.contextmanager
def make_hosts(
    num_workers: int, logs: pathlib.Path, cores: Sequence[int] = ()
) -> Iterator[Hosts]:
    """Yields hosts, and removes them at the end.

    Args:
      num_workers: Number of worker hosts; it is 1 where namespaces cannot be made.
      logs: Folder for the output of processes; made if missing.
      cores: Core number to which each worker is pinned; empty to pin none.
    """
    reason = why_no_namespaces()
    logs.mkdir(parents=True, exist_ok=True)
    hosts = Hosts(1, logs, cores) if reason else Namespaces(num_workers, logs, cores)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield hosts
    finally:
        hosts.close()
        signal.signal(signal.SIGTERM, before)


def remove_stale() -> None:
    """Removes namespaces whose program has ended, and the processes in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        owner = rest.partition("-")[0]
        ours = prefix == _PREFIX and owner.isdigit()
        if ours and not pathlib.Path(f"/proc/{owner}").exists():
            _remove(name)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def _ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise InputError(f"Expected ip {' '.join(arguments)}: {result.stderr.strip()}")


def _inhabitants(namespace: str) -> list[int]:
    result = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True
    )
    return [int(pid) for pid in result.stdout.split() if int(pid) != os.getpid()]


def _remove(namespace: str) -> None:
    """Removes a namespace and the processes in it."""

    def empty() -> bool:
        for pid in (pids := _inhabitants(namespace)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_for(f"no process in {namespace}", empty)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _enter_thread(namespace: str) -> None:
    """Moves the calling thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
