"""The command that compares: see ``python -m tests.frozen --help``."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import click

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


@click.group(invoke_without_command=True, help=frozen.__doc__)
@click.pass_context
def main(context: click.Context) -> None:
    """Compares what takes minutes, if no command is given."""
    if context.invoked_subcommand is None:
        changed = [_compare(kind, None) for kind in QUICK]
        context.exit(int(any(changed)))


def _compare(kind: str, only: list[str] | None) -> bool:
    """Prints what changed; returns whether something did."""
    module, same = KINDS[kind]
    answers = importlib.import_module(f"tests.frozen.{module}")
    before = compare.frozen(kind)
    if only:
        before = {name: before[name] for name in only}
    lines = compare.changes(before, answers.answer(only), same or answers.same)
    for line in lines:
        click.echo(f"{kind}: {line}")
    click.echo(f"{kind}: {len(before)} frozen answers, {len(lines)} changes")
    return bool(lines)


def _answer(kind: str, names: tuple[str, ...], freeze: bool) -> None:
    """Compares one kind, or freezes its answers."""
    if not freeze:
        raise SystemExit(_compare(kind, list(names) or None))
    answers = importlib.import_module(f"tests.frozen.{KINDS[kind][0]}")
    found = answers.answer(list(names) or None)
    kept = compare.frozen(kind) if names else {}
    compare.freeze(kind, {**kept, **found})


def _command(kind: str) -> click.Command:
    params: list[Any] = [
        click.Argument(["names"], nargs=-1),
        click.Option(["--freeze"], is_flag=True, help="Write the answers."),
    ]
    callback = functools.partial(_answer, kind)
    text = f"Compare {kind}: all, or the answers of the NAMES."
    return click.Command(kind, callback=callback, params=params, help=text)


for _kind in KINDS:
    main.add_command(_command(_kind))


@main.command()
@click.option("--base", required=True, help="A commit of this repository.")
@click.option("--rounds", default=3, help="Runs of each side, in turn.")
def steps(base: str, rounds: int) -> None:
    """Print a step's seconds beside those of another commit.  Needs an idle machine."""
    for line in step_seconds.beside(base, rounds):
        click.echo(line)


@main.command()
@click.argument("names", nargs=-1)
def faults(names: tuple[str, ...]) -> None:
    """Plant each fault in a copy of the tree, and run the tests that must catch it."""
    missed = 0
    for fault in planted_faults.chosen(names):
        problem = planted_faults.replay(fault)
        missed += problem is not None
        click.echo(f"{fault.name}: {problem or 'caught'}")
    raise SystemExit(int(missed > 0))


if __name__ == "__main__":
    main(prog_name="python -m tests.frozen")
