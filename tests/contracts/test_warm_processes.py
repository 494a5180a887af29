"""Warm processes are processes like any other to who starts them."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess

from tests.warm_processes import warm_python


def test_a_killed_warm_process_ends_by_its_signal(tmp_path: pathlib.Path) -> None:
    code = f"""if True:
        import os, sys
        assert "tensorflow" in sys.modules
        print(sys.argv[1], os.getcwd(), os.environ["OF_THIS_CALL"], flush=True)
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    """
    done = subprocess.run(
        [warm_python(), "-c", code, "argument"],
        cwd=tmp_path, env={**os.environ, "OF_THIS_CALL": "1"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.stdout == f"argument {tmp_path} 1\n"
    assert done.returncode == -signal.SIGKILL


def test_a_warm_process_ends_when_what_started_it_is_killed() -> None:
    """Seen to fail: a worker of MPI spun for the rest of the tests."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    started = subprocess.Popen(
        [warm_python(), "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    ended = os.pidfd_open(int(started.stdout.readline()))
    started.kill()
    assert select.select([ended], [], [], 60)[0]
    started.communicate()
