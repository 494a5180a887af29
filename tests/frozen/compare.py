"""What was frozen, and whether it is still so.

A kind of answers is a JSON object in ``answers/``: a name for each answer, which says
what was asked, and the answer: a text, or a list of numbers.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "answers"

#: Name -> answer.
Answers = dict[str, Any]
#: (frozen answer, answer of this code) -> whether it has not changed.
Same = Callable[[Any, Any], bool]


def frozen(name: str) -> Answers:
    """Returns the frozen answers of a kind."""
    answers: Answers = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return answers


def freeze(name: str, answers: Answers) -> None:
    """Freezes the answers of a kind.

    Args:
      name: The kind.
      answers: Its answers.
    """
    lines = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(answers[key])}" for key in sorted(answers)
    )
    (FOLDER / f"{name}.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def within(tolerance: float) -> Same:
    """Returns a comparison whose numbers may move by ``tolerance``, relatively."""
    return functools.partial(_close, tolerance)


def _close(tolerance: float, before: Any, now: Any) -> bool:
    if isinstance(before, str) or isinstance(now, str):
        return bool(before == now)
    return len(before) == len(now) and all(
        math.isclose(old, new, rel_tol=tolerance)
        for old, new in zip(before, now, strict=True)
    )


def changes(before: Answers, now: Answers, same: Same) -> list[str]:
    """Returns a line for each answer that changed, appeared or is gone.

    Args:
      before: Frozen answers.
      now: Answers of this code.
      same: Whether an answer has not changed.
    """
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name}: gone (was {before[name]})")
        elif name not in before:
            lines.append(f"{name}: not frozen (is {now[name]})")
        elif not same(before[name], now[name]):
            lines.append(f"{name}: was {before[name]}, is {now[name]}")
    return lines
