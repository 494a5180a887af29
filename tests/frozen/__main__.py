"""The command that compares: see ``python -m tests.frozen --help``."""

from __future__ import annotations

import functools
import importlib
import sys

import cyclopts

from tests import frozen
from tests.frozen import compare, planted_faults, step_seconds

#: Kind -> the module that answers, and how answers are compared.  Bits of gradients
#: depend on TensorFlow's kernels, those of noise and epsilon on NumPy's and SciPy's.
KINDS: dict[str, tuple[str, compare.Same | None]] = {
    "batches": ("batch_bytes", compare.within(0.0)),
    "accountant": ("accountant_answers", compare.within(1e-6)),
    "sums": ("gradient_sums", compare.within(1e-5)),
    "tables": ("table_metrics", None),  # by its own rule
}
QUICK = ("batches", "accountant", "sums")


app = cyclopts.App(
    name="python -m tests.frozen",
    help=frozen.__doc__,
    default_parameter=cyclopts.Parameter(negative=()),
)


@app.default
def main() -> None:
    """Compares what takes minutes, if no command is given."""
    changed = [_compare(kind, None) for kind in QUICK]
    sys.exit(int(any(changed)))


def _compare(kind: str, only: list[str] | None) -> bool:
    """Prints what changed; returns whether something did."""
    module, same = KINDS[kind]
    answers = importlib.import_module(f"tests.frozen.{module}")
    before = compare.frozen(kind)
    if only:
        before = {name: before[name] for name in only}
    lines = compare.changes(before, answers.answer(only), same or answers.same)
    for line in lines:
        print(f"{kind}: {line}")
    print(f"{kind}: {len(before)} frozen answers, {len(lines)} changes")
    return bool(lines)


def _answer(kind: str, *names: str, freeze: bool = False) -> None:
    """Compares one kind, all or the answers of the names; or freezes them."""
    if not freeze:
        raise SystemExit(_compare(kind, list(names) or None))
    answers = importlib.import_module(f"tests.frozen.{KINDS[kind][0]}")
    found = answers.answer(list(names) or None)
    kept = compare.frozen(kind) if names else {}
    compare.freeze(kind, {**kept, **found})


for _kind in KINDS:
    app.command(functools.partial(_answer, _kind), name=_kind)


@app.command
def steps(*, base: str, rounds: int = 3) -> None:
    """Print a step's seconds beside those of another commit.  Needs an idle machine.

    Args:
      base: A commit of this repository.
      rounds: Runs of each side, in turn.
    """
    for line in step_seconds.beside(base, rounds):
        print(line)


@app.command
def faults(*names: str) -> None:
    """Plant each fault in a copy of the tree, and run the tests that must catch it."""
    missed = 0
    for fault in planted_faults.chosen(names):
        problem = planted_faults.replay(fault)
        missed += problem is not None
        print(f"{fault.name}: {problem or 'caught'}")
    raise SystemExit(int(missed > 0))


if __name__ == "__main__":
    app()
