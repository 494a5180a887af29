"""The work of ``dpsgd prepare`` for a table with a column of kind user."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from accounting.validation import InputError
from pipelines.cli.engine import task_runner
from pipelines.files.progress_bars import Bars
from pipelines.files.stopping import RESUMES, stoppable
from pipelines.tables import convert
from pipelines.tables.table_format import TableOptions
from pipelines.users.bound import DEFAULT_MEMORY_LIMIT, bound, threads_for
from pipelines.users.bound_job import BoundSettings
from pipelines.users.bound_steps import STEPS
from pipelines.users.prepare_users import PrepareTable, prepare_users

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

_NEEDED = ("max_examples_per_user", "num_examples")
_FLAGS = (*_NEEDED, "sampled", "keep_users", "key_file", "memory_limit")
#: Names of the progress bars; the prefix distinguishes steps of the same name.
_OF_TABLE = ("divide", "check", "convert", "write")
_OF_USERS = {step: f"users: {step}" for step in STEPS}


def take(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the flags about users from ``options`` and returns them."""
    return {name: options.pop(name) for name in _FLAGS if name in options}


def settings_for(
    prepared: Any, flags: dict[str, Any], schema_file: str | None
) -> BoundSettings | None:
    """Returns how users are bounded; None if the table has none, or keeps their ids.

    Args:
      prepared: Options of the table.
      flags: Flags about users, by name; those used here are removed.
      schema_file: Schema of the table; None for Criteo's text.

    Raises:
      InputError: flags without a column of users, or missing flags.
    """
    user = prepared.schema.user if isinstance(prepared, TableOptions) else ""
    if not user:
        if not flags:
            return None
        raise InputError(
            f"Expected no {_flag(next(iter(flags)))} without a column of kind user. "
            'Leave it out, or write kind = "user" for the column of ids, in '
            f"{schema_file or 'a schema of the table'}."
        )
    if flags.pop("keep_users", False):
        _refuse_beside_ids(flags)
        return None
    missing = [name.replace("_", "-") for name in _NEEDED if name not in flags]
    if missing:
        raise InputError(
            f"Expected --{' and --'.join(missing)} beside column {user} of kind user, "
            "such as --max-examples-per-user 5 --num-examples NUMBER: they bound the "
            "rows kept of a user and of all, for training. NUMBER is public; of ten "
            "times the rows that are kept, batches hold a tenth of --batch-size. Give "
            f'both, or write kind = "drop" in {schema_file}.'
        )
    names = [name for name in (*_NEEDED, "sampled") if name in flags]
    return BoundSettings(user_column=user, **{name: flags.pop(name) for name in names})


def _refuse_beside_ids(flags: dict[str, Any]) -> None:
    for name in flags:
        flag = _flag(name)
        raise InputError(
            f"Expected no {flag} beside --keep-users, which bounds nobody. Leave one "
            "of them out."
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-').replace('sampled', 'sample')}"


def without_counts(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns a summary without sizes that depend on how many rows each user has."""
    counts = ("rows", "bytes_written", "rows_per_second")
    return {name: value for name, value in summary.items() if name not in counts}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the command.

    Attributes:
      settings: How users are bounded.
      key_file: File of the key that chooses rows; None for a temporary key.
      memory_limit: Memory for the threads of this process, in bytes.
    """

    settings: BoundSettings
    key_file: str | None = None
    memory_limit: int = DEFAULT_MEMORY_LIMIT

    def prepare(
        self,
        source: str,
        out: str,
        options: TableOptions,
        beam_options: PipelineOptions | None,
        num_threads: int | None,
    ) -> dict[str, Any]:
        """Prepares a table and returns a summary, which holds no counts of its rows.

        Args:
          source: File, folder or glob.
          out: New or empty folder.
          options: Options of the table.
          beam_options: Beam's options; None for this process.
          num_threads: Number of threads of this process; by default its cores.

        Raises:
          InputError: the options or the table are refused.
        """
        threads_for(self.memory_limit, num_threads)
        with stoppable(RESUMES), Bars([*_OF_TABLE, *_OF_USERS.values()]) as bars:
            summary = prepare_users(
                source,
                out,
                options,
                self.settings,
                key_file=self.key_file,
                prepare_table=_prepare_table(beam_options, bars, num_threads),
                bound_table=functools.partial(
                    bound,
                    memory_limit=self.memory_limit,
                    num_threads=num_threads,
                    run_tasks=task_runner(beam_options),
                    on_progress=lambda step, *done: bars.update(_OF_USERS[step], *done),
                ),
            )
        return self._shown(out, summary)

    def _shown(self, out: str, summary: convert.PrepareSummary) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "out": out,
            "unit_of_privacy": "user",
            "an_example_is": self.settings.sampled.removesuffix("s"),
            "max_examples_per_user": self.settings.max_examples_per_user,
            "num_examples": self.settings.num_examples,
            "input_files": summary.num_files,
            "malformed_lines": summary.num_bad_lines,
            "columns_left_out": [self.settings.user_column, *summary.left_out],
        }
        if summary.num_bad_lines:
            shown["first_malformed_lines"] = list(summary.bad_lines)
        return shown


def _prepare_table(
    beam_options: PipelineOptions | None, bars: Bars, num_threads: int | None
) -> PrepareTable:
    if beam_options is None:
        return functools.partial(
            convert.prepare, num_threads=num_threads, on_progress=bars.update
        )
    from pipelines.tables.job.prepare_job import prepare_on

    return functools.partial(
        prepare_on, pipeline_options=beam_options, on_progress=bars.update
    )
