"""Runs a command line of ``dpsgd`` in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence

from dpsgd import command_line


@dataclasses.dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None = None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(tokens: Sequence[object], *, catch: bool = True) -> Result:
    """Runs a command line; an error is caught, unless ``catch`` is false."""
    out, err = io.StringIO(), io.StringIO()
    status, error = 2, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command_line.run([str(token) for token in tokens])
        except Exception as caught:
            if not catch:
                raise
            error = caught
            print(f"error: {caught}", file=err)
    return Result(status, out.getvalue(), err.getvalue(), error)
