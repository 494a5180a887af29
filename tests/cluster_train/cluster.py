"""Workers on hosts that are network namespaces, started by MPI as over ssh."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from tests.engines.harness.hosts import HEAD, Hosts, Process
from tests.engines.harness.polling import wait_for

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = pathlib.Path(sys.executable)
MPIEXEC = shutil.which("mpiexec", path=PYTHON.parent)

#: A host has one core, and TensorFlow as many threads.
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}

#: The network device of the workers, and another one, on which nothing may listen.
DEVICE, OTHER_DEVICE = "eth0", "eth1"

#: A variable that says of which job a process is.
_JOB = "DPSGD_CLUSTER_JOB"

#: Runs a command with the variables of this host, if it has any.
_ON_HOST = """#!/bin/sh
eval "only=\\$ON_$(hostname)"
exec env $only "$@"
"""

_LISTENS = "0A"


class Cluster:
    """Hosts, and what starts a job on them.

    Args:
      hosts: Their workers are those of the jobs, in their order.
      folder: For the launcher and for logs.
    """

    def __init__(self, hosts: Hosts, folder: pathlib.Path) -> None:
        self.hosts = hosts
        self._shell = _program(folder / "as-ssh", _shell(hosts))
        self._on_host = _program(folder / "on-host", _ON_HOST)
        for number, host in enumerate(hosts.workers):
            _add_device(hosts.entrance(host), f"10.78.0.{number}")

    def train(
        self,
        name: str,
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
    ) -> Process:
        """Starts `dpsgd train` on all workers, one on each.

        Args:
          name: Of the job, for its log; no other's.
          arguments: Of `dpsgd train`.
          variables: Of the environment, beside those of every job; ``ON_worker1`` has
            those of one host, as NAME=VALUE.
        """
        assert MPIEXEC is not None
        addresses = map(self.hosts.address, self.hosts.workers)
        launcher = ["-launcher", "ssh", "-launcher-exec", str(self._shell)]
        where = ["-hosts", ",".join(addresses), "-ppn", "1", "-iface", DEVICE]
        command = [
            str(self._on_host),
            str(PYTHON),
            "-m",
            "tests.cluster_train.one_secret",
            *arguments,
        ]
        return self.hosts.start(
            HEAD,
            name,
            [MPIEXEC, *launcher, *where, *command],
            {
                **os.environ,
                **ONE_THREAD,
                # One kernel: MPI would find shared memory, which hosts have not.
                "UCX_TLS": "tcp,self",
                "UCX_NET_DEVICES": DEVICE,
                "PYTHONPATH": str(ROOT),
                _JOB: name,
                **(variables or {}),
            },
        )

    def worker(self, job: Process, rank: int) -> int:
        """Returns the process id of a worker of a job, once it runs Python."""
        return wait_for(f"worker {rank}", lambda: next(_workers(job, rank), None))


def _program(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def _add_device(entrance: list[str], address: str) -> None:
    for line in (
        f"link add {OTHER_DEVICE} type veth peer name eth2",
        f"address add {address}/24 dev {OTHER_DEVICE}",
        f"link set {OTHER_DEVICE} up",
        "link set eth2 up",
    ):
        subprocess.run([*entrance, "ip", *line.split()], check=True)


def _shell(hosts: Hosts) -> str:
    """Returns what takes the place of ssh: options, address, and a command to run."""
    cases = "\n".join(
        f"{hosts.address(host)}) name={host} enter={shlex.quote(entrance)} ;;"
        for host in hosts.workers
        for entrance in [shlex.join(hosts.entrance(host))]
    )
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
esac
shift
exec $enter unshare --uts sh -c "hostname $name; exec $*"
"""


def _workers(job: Process, rank: int) -> Iterator[int]:
    """Yields the processes of a job that are Python at this rank."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            program = (path / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            continue  # it has ended
        wanted = {f"PMI_RANK={rank}", f"{_JOB}={job.name}"}
        ours = wanted <= {variable.decode() for variable in variables}
        if ours and program == bytes(PYTHON):
            yield int(path.name)


def listening(pid: int | str) -> dict[str, str]:
    """Returns socket -> address of what listens on the host of a process."""
    found = {}
    for name in ("tcp", "tcp6"):
        lines = pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        for fields in map(str.split, lines):
            if fields[3] == _LISTENS:
                found[fields[9]] = _address(fields[1].partition(":")[0])
    return found


def _address(digits: str) -> str:
    """Returns an address that the kernel wrote as words of its own byte order."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, data)
