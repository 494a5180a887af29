"""The ``dpsgd`` command, whose commands are imported when they are used."""

from __future__ import annotations

import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from accounting.core.validation import InputError, did_you_mean
from dpsgd import __version__
from pipelines.files.processes import StoppedError, stoppable

#: Name -> (module and name of the function, its line in the list of commands).
COMMANDS = {
    "demo": (
        "trainer.cli.demo:demo",
        "Run everything on synthetic data, with a report and plots.",
    ),
    "fit": (
        "dpsgd.fit_command:fit",
        "Make a private model of a table, in one command.",
    ),
    "synth": (
        "pipelines.cli.data_commands:synth",
        "Write Criteo-format text with a signal.",
    ),
    "schema": (
        "pipelines.cli.data_commands:schema",
        "Write a first schema of a table.",
    ),
    "prepare": (
        "pipelines.cli.data_commands:prepare",
        "Turn a raw table into numeric Parquet.",
    ),
    "statistics": (
        "trainer.cli.run_commands:statistics",
        "Find ranges of columns, with an epsilon for them.",
    ),
    "plan": ("accounting.cli.plan_command:plan", "Noise that each sampler needs."),
    "batches": (
        "pipelines.cli.batch_commands:batches",
        "Sample and write batches with Beam.",
    ),
    "verify": (
        "pipelines.cli.batch_commands:verify",
        "Check batches against their checksums.",
    ),
    "train": ("trainer.cli.train_command:train", "Train on batches, with DP-SGD."),
    "tune": (
        "trainer.cli.several_runs:tune",
        "Try many settings, and release the best model alone.",
    ),
    "evaluate": (
        "trainer.cli.run_commands:evaluate",
        "Evaluate a run on held-out rows, with an epsilon for them.",
    ),
    "predict": (
        "trainer.cli.run_commands:predict",
        "Predict the rows of a table with a finished run.",
    ),
    "compare": (
        "trainer.cli.several_runs:compare",
        "Compare samplers and methods at one epsilon or noise.",
    ),
    "account": (
        "trainer.cli.account_commands:account",
        "The epsilon of a run or a plan.",
    ),
    "audit": (
        "trainer.cli.account_commands:audit",
        "Attack a run's mechanism: lower bounds on epsilon.",
    ),
    "report": (
        "trainer.cli.run_commands:report",
        "Write one HTML page about a run, to show to others.",
    ),
}

_FIRST = (*COMMANDS, "--help", "--version", "--completion")
_OWN = ("accounting", "dpsgd", "pipelines", "trainer")

_START = """\
dpsgd: DP-SGD on true Poisson batches, with the epsilon of what ran.

Four ways to start:
  dpsgd demo                         everything on synthetic data, in minutes
  dpsgd fit TABLE --label COLUMN --epsilon 3
                                     a private model of your table, and its page
  dpsgd plan --num-examples 46000000 --batch-size 65536 --epochs 1 \\
      --epsilon 3 --delta 1e-9       the noise that each sampler needs
  python -c "import dpsgd; help(dpsgd.make_private)"
                                     your own Keras model

dpsgd --help lists the commands.
"""


def function_of(name: str) -> Callable[..., Any]:
    """Imports a command.

    Args:
      name: Name of the command, in ``COMMANDS``.
    """
    module, function = COMMANDS[name][0].split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def run(tokens: Sequence[str]) -> int:
    """Runs a command line; returns its exit status.

    Args:
      tokens: What stands behind ``dpsgd``.

    Raises:
      InputError: there is no such command, or it refuses what is given.
    """
    name, *rest = tokens or ("",)
    if name in COMMANDS:
        from accounting.cli.command import call  # cyclopts, for a command alone

        return int(call(function_of(name), rest, f"dpsgd {name}") or 0)
    if name == "--completion":
        print(_completion(*rest[:1]))
    elif name == "--version":
        print(f"dpsgd, version {__version__}")
    elif name in ("", "--help"):
        print(_START if not name else _commands(), end="")
    else:
        kind = "option" if name[0] == "-" else "command"
        raise InputError(f"No such {kind}: {name}.{did_you_mean(name, _FIRST)}")
    return 0


def _commands() -> str:
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: dpsgd COMMAND [OPTIONS]\n",
            "DP-SGD on true Poisson batches of large data sets, with the epsilon of "
            "what ran.\n",
            "Commands:",
            *lines,
            "\ndpsgd COMMAND --help has the options of a command, and two examples.",
            "dpsgd --completion bash|zsh prints what a shell reads to complete them.\n",
        ]
    )


def _completion(shell: Any = "") -> str:
    """Returns the script by which a shell completes commands and options.

    Raises:
      InputError: another shell.
    """
    if shell not in ("bash", "zsh"):
        raise InputError(f"Expected --completion bash or zsh, not {shell!r}.")
    from accounting.cli.command import app_of_all

    functions = {name: function_of(name) for name in COMMANDS}
    return app_of_all("dpsgd", functions).generate_completion(shell=shell)


def reference() -> str:
    """Returns a section for each command: what it does, and its options by group."""
    return "\n\n".join(part for name in COMMANDS for part in _section(name))


def _section(name: str) -> Iterator[str]:
    from accounting.cli.command import options_by_group

    function = function_of(name)
    yield f"## dpsgd {name}"
    text = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0]
    for paragraph in text.split("\n\n"):
        first, *lines = paragraph.split("\n")
        if first.startswith("For example"):
            yield "```text\n" + inspect.cleandoc("\n".join(["", *lines])) + "\n```"
        else:
            yield _escaped(paragraph)
    for group, options in options_by_group(function).items():
        yield f"**{group}**"
        yield "\n".join(f"- `{names}`: {_escaped(text)}" for names, text in options)


def _escaped(text: str) -> str:
    """Returns text that Markdown shows as it is, except for code."""
    return re.sub(r"(?<!`)([*_<\[\]])", r"\\\1", text)


def main() -> None:
    """Runs the command line; prints an error that the user can fix as one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may hold any character
            stream.reconfigure(errors="backslashreplace")
    try:
        with stoppable():
            sys.exit(run(sys.argv[1:]))
    except StoppedError as error:
        _fail(str(error), error.exit_status)
    except InputError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:  # before the signal handlers are set
        _fail("Stopped. Give the same command again.", 130)
    except OSError as error:
        _fail(_output_error(error) or _system_error(error), 2)
    except MemoryError:  # its text may hold how many rows were chosen
        _fail(
            "Expected enough memory for this. Free some; or give the command less to "
            "do at a time: see the sizes, threads and limits in --help.",
            2,
        )
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise  # a bug of this project
        _fail(
            f"Expected the package {error.name} to be installed, which this command "
            "needs. Run, in a clone of the project: pip install '.[train]'",
            2,
        )


def _output_error(error: OSError) -> str | None:
    """Returns the error of standard output; None if it takes one more line."""
    if error.filename is not None:
        return None
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return (
            f"Expected standard output to take what is printed: {error.strerror}. "
            "Files that the command made stay: see them before you give it again."
        )
    return None


def _system_error(error: OSError) -> str:
    """Returns the system's reason and the file; never a library's own message."""
    reason = error.strerror if error.errno else None
    where = f" ({error.filename})" if isinstance(error.filename, str) else ""
    return (
        f"Expected to read and write files: {reason or type(error).__name__}{where}. "
        "Fix that, then give the same command again."
    )


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
