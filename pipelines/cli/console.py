"""Tables of public values on standard output; ``--runner``, and options of Beam."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table

from accounting.core.validation import InputError, did_you_mean
from pipelines.job.runtime import Runtime, quiet_beam

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


def format_size(num_bytes: float) -> str:
    """Returns a number of bytes in readable units.

    Example:
      >>> format_size(3 << 20)
      '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def show(title: str, fields: dict[str, Any], as_json: bool) -> None:
    """Prints fields as JSON, or as a table with one line per field.

    Args:
      title: Title of the table.
      fields: Name -> JSON-serialisable value.
      as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    # Fingerprints go below the table, where they are not wrapped and can be copied.
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if not name.endswith("fingerprint"):
            table.add_row(name.replace("_", " "), _for_people(name, value))
    Console(markup=False).print(table)
    for name, value in fields.items():
        if name.endswith("fingerprint"):
            print(f"{name.replace('_', ' ')}: {value}")


def _for_people(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_for_people('', v)}" for key, v in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if "bytes" in name.split("_"):
        return format_size(value)
    if name.endswith("padding"):
        return f"{value:.1%}"
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return "none" if value is None else str(value)


def beam_options(
    arguments: Sequence[str], names: Sequence[str] = ()
) -> PipelineOptions:
    """Returns Beam's options, and keeps Beam's log off the terminal.

    Args:
      arguments: Options for Beam.
      names: The options of the command.

    Raises:
      InputError: Beam does not know an option.
    """
    quiet_beam()
    from apache_beam.options import pipeline_options

    class Parser(pipeline_options._BeamArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise InputError(f"Expected options of Beam: {message}.")

    parser = Parser(add_help=False, allow_abbrev=False)
    for options in pipeline_options.PipelineOptions.__subclasses__():
        with contextlib.suppress(argparse.ArgumentError):
            options._add_argparse_args(parser)
    _, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise InputError(
            f"Expected {unknown[0]} to be an option of this command or of Beam. See "
            f"--help.{_similar(unknown[0], names)}"
        )
    return pipeline_options.PipelineOptions([*arguments])


def _similar(given: str, names: Sequence[str]) -> str:
    return did_you_mean(given.partition("=")[0], names)


def runtime(
    runner: str | None,
    others: Sequence[str],
    num_threads: int | None,
    names: Sequence[str],
) -> Runtime:
    """Returns where tasks run.

    Args:
      runner: Name of a Beam runner; None for this process.
      others: Options that the command does not know, for Beam.
      num_threads: Number of threads of this process, if given.
      names: The options of the command.

    Raises:
      InputError: Beam's options without a runner, or threads beside one; Beam does not
        know an option, or the runner may lose elements.
    """
    if runner is None:
        if others:
            raise InputError(
                f"Expected no {others[0]!r} without --runner: only Beam may have such "
                f"an option. See --help.{_similar(others[0], names)}"
            )
        return Runtime(num_threads=num_threads)
    if num_threads is not None:
        raise InputError("Expected no --threads beside --runner. Leave it out.")
    options = beam_options([f"--runner={runner}", *others], names)
    from pipelines.job.engine_tasks import run_on_engine
    from pipelines.job.poisson_batching import runner_of

    runner_of(options)
    return Runtime(run_tasks=functools.partial(run_on_engine, options))
