"""Commands of ``dpsgd`` that a command runs one by one, each as its own process.

Each is printed as a person would type it, so that one can go on by hand.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from accounting.core.validation import InputError


def run(
    number: int,
    total: int,
    title: str,
    arguments: Sequence[str],
    *,
    aside: bool = False,
    remedy: str = "",
) -> None:
    """Runs a stage.

    Args:
      number: Its number, from 1.
      total: Number of stages.
      title: What it does.
      arguments: Arguments of ``dpsgd``.
      aside: Whether standard output is for something else.
      remedy: What to do, beside what the command says, if it fails.

    Raises:
      InputError: the command failed; its message was printed.
    """
    place = sys.stderr if aside else sys.stdout
    print(f"\n[{number}/{total}] {title}", file=place)
    print(f"$ dpsgd {shlex.join(arguments)}", file=place, flush=True)
    command = [sys.executable, "-m", "dpsgd", *arguments]
    stdout = sys.stderr if aside else None
    status = subprocess.run(command, check=False, stdout=stdout).returncode
    if status:
        raise InputError(
            f"Expected stage {number}, dpsgd {arguments[0]}, to succeed; its exit "
            f"status is {status}. Its own message is above. {remedy}".rstrip()
        )
