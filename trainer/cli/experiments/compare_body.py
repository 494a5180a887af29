"""The work of ``dpsgd compare``, after its flags.

Public: what is printed.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator

from pipelines.core.files.locks import locked
from pipelines.files.folders import usable_folder
from trainer.experiments.compare import compare
from trainer.settings.requests import ComparisonSettings


def run(settings: ComparisonSettings, *, as_json: bool) -> None:
    """Carries out a comparison, and prints its report.  Errors are those of `compare`.

    Args:
      settings: What to compare.
      as_json: Whether to print only JSON.
    """
    with _alone(settings.out):
        report = compare(settings, _say)
        fields = report.write(settings.out)
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    report.show()
    print(f"report in {settings.out / report.stem}.md")


@contextlib.contextmanager
def _alone(out: pathlib.Path) -> Iterator[None]:
    """Keeps other processes out of the folder of a comparison.

    A folder that was made for the lock alone is removed again.
    """
    with contextlib.ExitStack() as held:
        with usable_folder(out, "--out"):
            if not out.exists():
                out.mkdir(parents=True)
                held.callback(_remove_if_empty, out)
            held.enter_context(locked(out, out))
        yield


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _remove_if_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
