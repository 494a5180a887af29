"""Engines embedded in their job server: a whole Flink or Spark in one Java process.

``dpsgd batches --runner=FlinkRunner`` starts the same by itself.  Here one job server
serves many jobs, which saves most of the time of a small one.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import subprocess
from collections.abc import Iterator, Sequence

from accounting.core.validation import InputError
from tests.engines.harness import parts
from tests.engines.harness.polling import wait_for

RUNNERS = {"flink": "FlinkRunner", "spark": "SparkRunner"}
#: Spark needs these on Java 17; Beam gives its own job servers the same.
OPENS = [
    f"--add-opens=java.base/{name}=ALL-UNNAMED"
    for name in (
        "java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net",
        "java.nio", "java.text", "java.time", "java.util", "java.util.concurrent",
        "java.util.concurrent.atomic", "java.util.concurrent.locks", "sun.nio.ch",
        "sun.nio.cs", "sun.security.action", "sun.util.calendar",
    )
]  # fmt: skip


@contextlib.contextmanager
def job_server(engine: str, log: pathlib.Path) -> Iterator[list[str]]:
    """Runs a job server; yields the options of ``dpsgd batches`` for it.

    Args:
      engine: One of ``parts.ENGINES``.
      log: File for the output of the engine.

    Raises:
      InputError: it does not start.
    """
    port = free_port()
    with open(log, "ab") as file:
        process = subprocess.Popen(
            job_server_command(engine, port, log.with_suffix(".artifacts")),
            env=parts.environment(),
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(f"the job server for {engine}", lambda: _answers(process, port, log))
        yield [
            f"--runner={RUNNERS[engine]}",
            f"--job_endpoint=localhost:{port}",
            "--environment_type=LOOPBACK",
        ]
    finally:
        process.terminate()
        process.wait()


def job_server_command(
    engine: str, port: int, artifacts: pathlib.Path, java_options: Sequence[str] = ()
) -> list[str]:
    """Returns the command line of a job server.

    Args:
      engine: One of ``parts.ENGINES``.
      port: For jobs; the job server chooses its other ports.
      artifacts: Folder for the files that jobs bring.
      java_options: Further options of its Java.
    """
    jar = parts.job_server(engine)
    return [
        "java", *OPENS, *java_options, "-jar", str(jar),
        "--job-port", str(port), "--artifact-port", "0", "--expansion-port", "0",
        "--artifacts-dir", str(artifacts),
    ]  # fmt: skip


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _answers(process: subprocess.Popen[bytes], port: int, log: pathlib.Path) -> bool:
    if process.poll() is not None:
        raise InputError(f"Expected a job server to start; see the end of {log}.")
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
        return True
    return False
