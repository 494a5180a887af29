"""Options and commands that do not exist, and what of ours was meant.

What is meant is spelt alike, is called otherwise by other tools, or is the business of
another command.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from accounting.core.validation import did_you_mean, nearest

#: Words of other tools, without dashes -> our options and arguments, best first.  Of
#: these, the first that a command has is meant; without one, nothing is.
_CALLED = {
    "b": ("batch-size",),
    "c": ("l2-norm-clip",),
    "checkpoint": ("run", "initial-weights"),
    "clip": ("l2-norm-clip",),
    "data": ("batches", "input", "table", "directory"),
    "data-dir": ("batches", "input", "table", "directory"),
    "dataset": ("batches", "input", "table", "directory"),
    "eps": ("epsilon",),
    "file": ("input", "table", "directory"),
    "id": ("user-column", "user"),
    "input": ("input", "batches", "table", "directory", "run"),
    "k": ("max-examples-per-user",),
    "max-grad-norm": ("l2-norm-clip",),
    "model": ("model", "run"),
    "model-dir": ("run",),
    "n": ("num-examples", "rows"),
    "num-rows": ("num-examples", "rows"),
    "output": ("out",),
    "q": ("batch-size",),
    "run": ("run",),
    "run-dir": ("run",),
    "rows": ("rows", "num-examples"),
    "sample-rate": ("batch-size",),
    "samples": ("num-examples", "rows"),
    "sigma": ("noise-multiplier",),
    "steps": ("num-steps",),
    "t": ("num-steps",),
    "target": ("label",),
    "target-epsilon": ("epsilon",),
    "test": ("eval",),
    "test-data": ("eval",),
    "train-data": ("batches", "input"),
    "users": ("user-column", "user", "num-users"),
    "validation-data": ("eval",),
    "y": ("label",),
}

#: Command and option -> where its question is answered.
_ELSEWHERE = {
    ("account", "--epsilon"): "It computes epsilon; `dpsgd plan --epsilon` computes "
    "the noise for one.",
    ("batches", "--noise-multiplier"): "`dpsgd train --noise-multiplier` takes it.",
    ("predict", "--batch-size"): "Rows are predicted in parts of a fixed size.",
    ("predict", "--eval"): "`dpsgd predict RUN --input` takes any rows.",
    ("predict", "--label"): "A label is not needed.",
    ("train", "--label"): "`dpsgd schema --label` chooses the label.",
    ("train", "--seed"): "Noise has a secret key; --init-seed is of initial weights.",
}  # fmt: skip

#: Commands of other tools -> what ours do instead.
_COMMANDS = {
    "calibrate": "`dpsgd plan --epsilon` computes the noise for an epsilon.",
    "epsilon": "`dpsgd account` computes epsilon.",
    "eval": "`dpsgd evaluate` evaluates; `dpsgd predict` predicts any rows.",
    "generate": "`dpsgd synth` makes synthetic rows.",
    "infer": "`dpsgd predict` predicts the rows of a table.",
    "noise": "`dpsgd plan --epsilon` computes the noise for an epsilon.",
    "sample": "`dpsgd batches` samples and writes batches.",
    "score": "`dpsgd predict` predicts the rows of a table.",
    "test": "`dpsgd evaluate` evaluates; `dpsgd predict` predicts any rows.",
}


def meant(name: str, context: click.Context | None = None) -> str:
    """Returns a sentence on the option that was meant; empty if none is known.

    Args:
      name: Option as typed, perhaps with an equals sign and a value.
      context: Context of the command; None for the running one.
    """
    context = context or click.get_current_context(silent=True)
    if context is None:
        return ""
    bare = name.partition("=")[0].replace("_", "-")
    for each in (bare, *(f"--{word}" for word in _called(bare))):
        if elsewhere := _ELSEWHERE.get((context.info_name or "", each)):
            return f" {elsewhere}"
    found = _meant(bare, context)
    if found and not found.startswith("-"):
        return f" Give {found} without an option: dpsgd {context.info_name} {found}."
    return f" Did you mean {found}?" if found else ""


def command_meant(name: str, commands: Iterable[str]) -> str:
    """Returns a sentence on the command that was meant; empty if none is known.

    Args:
      name: Command as typed.
      commands: The names of all commands.
    """
    return f" {_COMMANDS[name]}" if name in _COMMANDS else did_you_mean(name, commands)


def instead_of(
    names: Sequence[str], given: Sequence[str], context: click.Context
) -> str:
    """Returns the unknown option that was given for a missing one; empty if none was.

    Commands that hand options to Beam keep those that they do not know.

    Args:
      names: Names of the missing option.
      given: All words of the command line.
      context: Context of the command.
    """
    known = _options(context)
    words = [word.partition("=")[0] for word in given if word.startswith("--")]
    unknown = [word for word in words if word not in known]
    return next((word for word in unknown if _meant(word, context) in names), "")


def _meant(name: str, context: click.Context) -> str:
    """Returns an option, or an argument in capitals; empty if none is known."""
    options = _options(context)
    if not (called := _called(name)):
        return nearest(name, options)
    arguments = [each.name for each in _params(context, "argument")]
    for each in called:
        if f"--{each}" in options:
            return f"--{each}"
        if each in arguments:
            return each.upper()
    return ""


def _called(name: str) -> tuple[str, ...]:
    return _CALLED.get(name.replace("_", "-").strip("-"), ())


def _options(context: click.Context) -> list[str]:
    names = [name for each in _params(context, "option") for name in each.opts]
    return [name for name in names if name.startswith("--")]


def _params(context: click.Context, kind: str) -> list[click.Parameter]:
    found = context.command.get_params(context)
    shown = (each for each in found if not getattr(each, "hidden", False))
    return [each for each in shown if each.param_type_name == kind]
