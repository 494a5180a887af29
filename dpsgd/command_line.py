"""The ``dpsgd`` command, whose subcommands are imported when they are used."""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
from typing import NoReturn

import click

from accounting.core.validation import InputError, did_you_mean
from dpsgd import __version__
from pipelines.files.stopping import StoppedError, stoppable

#: Name -> (module and name of the click command, its line in the list of commands).
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
        "trainer.cli.releases.statistics_commands:statistics_command",
        "Find ranges of columns, with an epsilon for them.",
    ),
    "plan": ("accounting.cli.commands:plan_command", "Noise that each sampler needs."),
    "batches": (
        "pipelines.cli.batch_commands:batches",
        "Sample and write batches with Beam.",
    ),
    "verify": (
        "pipelines.cli.batch_commands:verify",
        "Check batches or prepared data against their checksums.",
    ),
    "train": ("trainer.cli.commands:train_command", "Train on batches, with DP-SGD."),
    "tune": (
        "trainer.cli.releases.tune_commands:tune_command",
        "Try many settings, and release the best model alone.",
    ),
    "evaluate": (
        "trainer.cli.releases.evaluate_commands:evaluate_command",
        "Evaluate a run on held-out rows, with an epsilon for them.",
    ),
    "predict": (
        "trainer.cli.predict_commands:predict_command",
        "Predict the rows of a table with a finished run.",
    ),
    "compare": (
        "trainer.cli.experiments.compare_commands:compare",
        "Compare samplers and methods at one epsilon or noise.",
    ),
    "account": ("trainer.cli.commands:account", "The epsilon of a run or a plan."),
    "audit": (
        "trainer.cli.audit_commands:audit_command",
        "Attack a run's mechanism: lower bounds on epsilon.",
    ),
    "report": (
        "trainer.cli.report_commands:report",
        "Write one HTML page about a run, to show to others.",
    ),
}

_OWN = ("accounting", "dpsgd", "pipelines", "trainer")


class LazyGroup(click.Group):
    """A group that lists its subcommands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx  # the list does not depend on it
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of a command.

        Args:
          ctx: Context of the group.
          cmd_name: A name in ``COMMANDS``; for any other, None is returned.
        """
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        return getattr(importlib.import_module(module), name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds a command; for an unknown name the error suggests a similar one.

        Args:
          ctx: Context of the group.
          args: The command and its arguments.

        Raises:
          click.UsageError: there is no such command.
        """
        name = args[0]
        if name in COMMANDS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        raise click.UsageError(
            f"No such command {name!r}.{did_you_mean(name, COMMANDS)}"
        )

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Writes the list from ``COMMANDS``, so that ``--help`` imports nothing.

        Args:
          ctx: Context of the group.
          formatter: Receives the list.
        """
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup)
@click.version_option(__version__, prog_name="dpsgd")
def cli() -> None:
    """DP-SGD on true Poisson batches of large data sets, with the epsilon of what ran.

    \b
    Example, from raw text to a private model:
      dpsgd prepare --input train.txt --schema criteo --out data
      dpsgd batches --input data/train --out batches --sampler truncated-poisson \\
          --batch-size 1024 --epochs 1 --epsilon 3 --delta 1e-7
      dpsgd train --batches batches --eval data/test --out run \\
          --epsilon 3 --delta 1e-7
      dpsgd account run
    """


def main() -> None:
    """Runs the command line; prints an error that the user can fix as one line."""
    given = sys.argv[1:] or ["--help"]  # the name alone shows what there is
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may hold any character
            stream.reconfigure(errors="backslashreplace")
    try:
        _check_clock()
        with stoppable():
            # Shell completion needs this program name, also for `python -m dpsgd`.
            sys.exit(cli(given, prog_name="dpsgd", standalone_mode=False))
    except StoppedError as error:
        _fail(str(error), error.exit_status)
    except InputError as error:
        _fail(str(error), 2)
    except click.ClickException as error:
        _fail(f"{error.format_message()} See --help.", error.exit_code)
    except (click.Abort, KeyboardInterrupt):  # before the signal handlers are set
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


def _check_clock() -> None:
    """Refuses a clock before the first time that files of models can hold."""
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time()))
    if day < "1980-01-02":  # wherever on earth
        raise InputError(
            f"Expected the clock of this machine to be right; it says {day}, which is "
            "before what files can hold. Set it."
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
