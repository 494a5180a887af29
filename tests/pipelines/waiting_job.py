"""A job that waits to be stopped: it cannot end before, whichever process is slow."""

from __future__ import annotations

import subprocess

#: ``dpsgd``, whose workers in this process wait after a block until the job is
#: cancelled.
WAITING_JOB = """
import os, threading
import dpsgd
from pipelines.job import poisson_batching, transforms

cancel, write_spill = poisson_batching._cancel, transforms.write_spill
cancelled = threading.Event()

def cancel_and_go_on(jobs):
    cancel(jobs)
    cancelled.set()

def write_and_wait(*arguments, **options):
    write_spill(*arguments, **options)
    os.write(1, b"written\\n")  # of several threads, each whole
    cancelled.wait()

poisson_batching._cancel = cancel_and_go_on
transforms.write_spill = write_and_wait
dpsgd.main()
"""


def wait_for_a_block(process: subprocess.Popen[str]) -> None:
    """Returns once a block is written, or fails with what the process said.

    Args:
      process: Of ``WAITING_JOB``, with pipes for what it prints.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    assert first == "written\n", first or process.stderr.read()
