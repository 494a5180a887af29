"""A job that waits to be stopped: it cannot end before, whichever process is slow."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

#: ``dpsgd``, whose workers in its process wait after a block until it is cancelled.
_WAITING = """
import os, threading
import dpsgd.command_line
from pipelines.job import engine_tasks, transforms

cancel, write_spill = engine_tasks._cancel, transforms.write_spill
cancelled = threading.Event()

def cancel_and_go_on(jobs):
    cancel(jobs)
    cancelled.set()

def write_and_wait(*arguments, **options):
    write_spill(*arguments, **options)
    os.write(1, b"written\\n")  # of several threads, each whole
    cancelled.wait()

engine_tasks._cancel = cancel_and_go_on
transforms.write_spill = write_and_wait
dpsgd.command_line.main()
"""


@contextlib.contextmanager
def waiting_job(
    arguments: Sequence[str],
    root: pathlib.Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Yields the process once it has written a block; kills it if it is still there.

    Args:
      arguments: Of ``dpsgd``.
      root: Of the repository.
      environment: Of the process; as of this one if None.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _WAITING, *arguments],
        cwd=root, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            first = process.stdout.readline()
            assert first == "written\n", first or process.stderr.read()
            yield process
        finally:
            process.kill()
