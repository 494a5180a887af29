"""Guarantees of stopping: in a context, of libraries, and of the command."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from pipelines.files.processes import StoppedError, on_signals, stoppable
from pipelines.tables.synthetic import SynthOptions, write_synth

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
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_without_a_signal_an_error_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError), stoppable():
        _ = 1 / 0


@pytest.mark.parametrize("number", SIGNALS)
def test_the_inner_of_two_contexts_says_how_to_go_on(number: int) -> None:
    with pytest.raises(StoppedError) as error, stoppable("outer"), stoppable("inner"):
        signal_self(number)
    assert (str(error.value), error.value.number) == ("inner", number)


def test_other_threads_change_no_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with on_signals(lambda _: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


#: ``dpsgd``, which gets a signal once there is a file in its folder of work: from
#: itself, since another process might be too late.
_SIGNALLED = """
import os, pathlib, sys
import dpsgd.command_line
from pipelines.files.progress_bars import Bars

number, folder = int(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
update, sent = Bars.update, []

def update_and_signal(bars, *progress):
    update(bars, *progress)
    files = folder.glob("*.unfinished/data/**/*")
    if not sent and any(path.is_file() for path in files):
        sent.append(number)
        os.kill(os.getpid(), number)

Bars.update = update_and_signal
dpsgd.command_line.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"), [("synth", SIGNALS[0]), ("prepare", SIGNALS[1])]
)
def test_stopped_data_commands_leave_no_result(
    root: pathlib.Path, tmp_path: pathlib.Path, number: int, command: str
) -> None:
    source = ["--rows=40000"]
    if command == "prepare":
        write_synth(tmp_path / "raw", SynthOptions(num_rows=20_000))
        source = [f"--input={tmp_path / 'raw'}", "--schema=criteo"]
    folder = tmp_path / "place"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _SIGNALLED, str(number), str(folder), command, *source,
         f"--out={folder / 'out'}"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 128 + number, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "error: Stopped by a signal. Give the same command again."
    assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()
    assert not list(folder.iterdir())
