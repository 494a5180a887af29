"""Commands that a signal stops, and calls in processes of their own."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from accounting.core.validation import InputError
from pipelines.files import processes
from pipelines.files.processes import StoppedError, stoppable
from pipelines.job.batch_settings import BatchSettings

ROOT = pathlib.Path(__file__).parents[3]
HELPER = """
import os, pathlib, signal, sys, time
from accounting.core.validation import InputError

def told(settings):
    print("noise on standard output")
    return os.getpid(), settings, "tensorflow" in sys.modules

def refused():
    raise InputError("Expected x=1 to be 2.")

def missing():
    raise FileNotFoundError(2, "No such file or directory", "nowhere")

def terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def waits(path):
    pathlib.Path(path).write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def helper(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only this process's ``sys.path`` leads to."""
    (tmp_path / "helper_of_calls.py").write_text(HELPER)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT), *sys.path])
    monkeypatch.chdir(tmp_path)


def test_objects_go_there_and_back() -> None:
    settings = BatchSettings(expected_batch_size=20, num_epochs=3)
    found = processes.call("helper_of_calls:told", settings)
    assert found[0] != os.getpid()
    assert found[1:] == (settings, False)


def test_errors_for_the_user_are_raised_here() -> None:
    with pytest.raises(InputError, match=r"^Expected x=1 to be 2\.$"):
        processes.call("helper_of_calls:refused")
    with pytest.raises(FileNotFoundError) as raised:
        processes.call("helper_of_calls:missing")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, "nowhere")
    with pytest.raises(StoppedError) as stopped:
        processes.call("helper_of_calls:terminated")
    assert stopped.value.number == signal.SIGTERM


def test_a_process_that_is_killed_is_an_error_in_one_line() -> None:
    with pytest.raises(
        InputError, match=r"memory for helper_of_calls:killed"
    ) as raised:
        processes.call("helper_of_calls:killed")
    assert "\n" not in str(raised.value)


def test_a_script_is_not_run_again(tmp_path: pathlib.Path) -> None:
    """Also one that calls without asking whether it is the main module."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pipelines.files import processes\n"
        "print('ran')\n"
        "print(processes.call('math:gcd', 12, 18))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "ran\n6\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_caller_ends_its_processes(
    tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    """A signal that ends the wait, and one that the caller never sees."""
    started = tmp_path / "started"
    script = (
        "from pipelines.files import processes\n"
        "with processes.stoppable():\n"
        f"    processes.call('helper_of_calls:waits', {str(started)!r})\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    _until(lambda: started.exists() and started.read_text())
    process.send_signal(number)
    assert process.wait(timeout=600)
    _until(lambda: not _is_alive(int(started.read_text())))


def _is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def _until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


SIGNALS = [signal.SIGINT, signal.SIGTERM]


def signal_self(number: int) -> None:
    """Raises what the handler does; a library that catches an Exception sees none."""
    try:
        os.kill(os.getpid(), number)
        signal.sigtimedwait([], 0)  # lets Python call the handler
    except Exception as caught:
        raise AssertionError("a library would take it") from caught
    raise AssertionError("the signal did nothing")


def signalled_library(number: int) -> None:
    """Makes an error of its own of whatever is raised."""
    try:
        signal_self(number)
    except BaseException as caught:
        raise RuntimeError(f"{caught} [while running]") from None


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("work", [signal_self, signalled_library])
def test_a_signal_ends_in_a_stopped_error(
    number: int, work: Callable[[int], None]
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(StoppedError) as error, stoppable("go on so"):
        work(number)
    assert str(error.value) == "go on so"
    assert error.value.exit_status == 128 + number
    assert isinstance(error.value, KeyboardInterrupt)  # as a notebook's user expects
    assert [signal.getsignal(number) for number in SIGNALS] == before
