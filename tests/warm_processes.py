"""Processes that start with the libraries imported: forks of one that imported them.

Importing TensorFlow takes longer than most commands that the documentation shows.  A
server imports once and forks for every request; the fork has the request's arguments,
folder, environment, standard streams and exit status, so to the shell it is a process
like any other; what it starts by ``sys.executable`` is warm, too.  The libraries must
be imported only, not used: TensorFlow that has computed does not survive a fork.

Not for tests of what happens at import: those start a Python of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import uuid
from typing import Any

from dpsgd.command_line import COMMANDS

ROOT = pathlib.Path(__file__).parent.parent
#: What commands and blocks of documentation import, by way of what imports it.
_IMPORTED = (
    *sorted({place.partition(":")[0] for place, _ in COMMANDS.values()}),
    "accounting.core.samplers.truncated_poisson", "accounting.cross_check",
    "matplotlib.figure", "pipelines.cli.batch_body", "pipelines.cli.data_body",
    "pipelines.job.poisson_batching", "pyarrow.compute", "pyarrow.csv", "scipy.stats",
    "trainer.html_report.page", "trainer.keras_model",
    "trainer.prediction.exported_model", "trainer.releases.evaluate", "trainer.train",
)  # fmt: skip
#: Sends its arguments and streams to the server, and ends as the fork ends.
_CLIENT = """
    import json, os, signal, socket, sys
    server = socket.socket(socket.AF_UNIX)
    server.connect({path!r})
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    launcher = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []
    streams = [0, 1, 2, *launcher]
    socket.send_fds(server, [len(request).to_bytes(8, "big")], streams)
    server.sendall(request)
    answers = server.makefile()
    child = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = int(answers.readline())
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
"""


@functools.cache
def warm_python() -> pathlib.Path:
    """Returns a program that takes ``-c CODE`` or ``-m MODULE``, and arguments.

    Its server ends with this process; workers of pytest share that of all of them.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    owner = os.getppid() if run else os.getpid()
    folder = pathlib.Path(tempfile.gettempdir(), f"warm-{run or uuid.uuid4().hex}")
    folder.mkdir(mode=0o700, exist_ok=True)
    python, path = folder / "python", folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            client = textwrap.dedent(_CLIENT).format(path=os.fspath(path))
            python.write_text(f"#!{sys.executable} -IS\n{client}")
            python.chmod(0o755)
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_processes", path, f"{owner}"],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
    return python


def _serve(path: pathlib.Path, owner: int) -> None:
    """Forks for every connection, until a process ends; returns in forks too."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    owned = os.pidfd_open(owner)
    while owned not in select.select([owned, listener], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(connection, os.fspath(path.with_name("python")))
            return
        connection.close()
    shutil.rmtree(path.parent)


def _answer(connection: socket.socket, program: str) -> None:
    """Reports the process identifier and exit status of a fork; returns in the fork.

    Args:
      connection: To the program that was started.
      program: Its path.
    """
    size, streams, _, _ = socket.recv_fds(connection, 8, 4)
    with connection.makefile("rb") as sent:
        arguments, folder, environment = json.loads(
            sent.read(int.from_bytes(size, "big"))
        )
    if child := os.fork():
        connection.sendall(b"%d\n" % child)
        ended = os.pidfd_open(child)
        # What started it may be killed: no fork outlives it, and spins in MPI.
        if ended not in select.select([ended, connection], [], [])[0]:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % status)
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
        os.close(stream)
    # New ones: those of the server know whether its own files could be sought in.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if streams[3:]:  # a socket of the launcher of MPI
        os.environ["PMI_FD"] = str(streams[3])
    sys.executable = program
    _become(arguments)


def _become(arguments: list[str]) -> None:
    """Does what ``python ARGUMENTS`` does.

    Raises:
      ValueError: arguments of another form.
    """
    option, what, *rest = arguments
    sys.argv = [option, *rest]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = ["", *filter(None, paths)]
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif option == "-c":
        module: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(what, "<string>", "exec"), module)
    else:
        raise ValueError(f"Expected -c or -m, not {option!r}.")


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    os.fsync = os.fstat  # type: ignore[assignment]  # as in the tests themselves
    gc.freeze()  # no fork looks through what it shares
    gc.set_threshold(30_000)  # as in tests/conftest.py
    _serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
