"""Warm processes are processes like any other to who starts them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess

import pytest

from tests.warm_processes import warm_python


def run(code: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), "-c", code, "argument"],
        cwd=folder, env={**os.environ, "OF_THIS_CALL": "1"}, input="in",
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_warm_process_has_its_own_surroundings(tmp_path: pathlib.Path) -> None:
    code = """if True:
        import os, sys
        print(sys.argv[1], os.getcwd(), os.environ["OF_THIS_CALL"], sys.stdin.read())
        print("tensorflow" in sys.modules, file=sys.stderr)
        sys.exit(3)
    """
    done = run(code, tmp_path)
    assert done.stdout == f"argument {tmp_path} 1 in\n"
    assert (done.stderr, done.returncode) == ("True\n", 3)
    for number in (signal.SIGKILL, signal.SIGTERM):
        killed = run(f"import os; os.kill(os.getpid(), {number})", tmp_path)
        assert killed.returncode == -number


def test_what_a_warm_process_starts_is_warm_and_finds_the_same_modules(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text("import sys; print(*sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    inner = "import own, sys; assert 'tensorflow' in sys.modules"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    assert run(code, tmp_path).stdout == "\n"
