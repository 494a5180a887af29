"""Arguments that `account` and `audit` share: a run, or the flags of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from accounting.cli import registered, shared_options
from accounting.core import plan as plans
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from trainer.core.run import run_record
from trainer.core.run.run_record import RunRecord
from trainer.report.run_files import read_finished

#: Adds the flags of a run and of a plan to a command.
options = shared_options.together(
    shared_options.delta("For a run, by default the one it was trained for."),
    registered.sampler("Sampler of a plan."),
    shared_options.num_examples("Number of examples or slots in the data set."),
    shared_options.batch_size("Expected batch size."),
    click.option("--truncated-batch-size", type=int, help="For truncated Poisson."),
    shared_options.bands("Groups of the examples of cyclic samplers."),
    shared_options.num_steps("Number of steps."),
    shared_options.epochs("Instead of --num-steps: epochs of n/b steps."),
    shared_options.noise_multiplier("Noise standard deviation over the clip norm."),
)

#: Flags that are allowed beside a run, whose record has the rest.
_BESIDE_A_RUN = ("delta", "allow_large_delta")


def read_run(
    run: Path, flags: dict[str, Any], *, allowed: Sequence[str] = ()
) -> tuple[RunRecord, Manifest]:
    """Returns record and manifest of a finished run; prints if it is a simulation.

    Args:
      run: A folder that `dpsgd train` wrote.
      flags: Flags of the command.
      allowed: Flags allowed beside a run, in addition to delta.

    Raises:
      InputError: other flags are given, or the run is unfinished or was edited.
    """
    for name, value in flags.items():
        if value is not None and name not in (*_BESIDE_A_RUN, *allowed):
            raise InputError(
                f"A run takes no --{name.replace('_', '-')}: its manifest and record "
                "say what was executed. Omit it."
            )
    read_finished(run)
    return run_record.read_run(run)


def check_complete(
    flags: dict[str, Any], names: Sequence[str], *, command: str
) -> None:
    """Refuses incomplete flags of a plan.

    Args:
      flags: Flags of the command.
      names: Names of the required flags.
      command: Name of the command.

    Raises:
      InputError: a required flag is missing.
    """
    for name in names:
        if flags[name] is None:
            raise InputError(
                f"--{name.replace('_', '-')} is missing. Name a run, or give the flags "
                f"of a plan: see `dpsgd {command} --help`."
            )


def plan(flags: dict[str, Any]) -> DpSgdPlan:
    """Returns the plan that complete flags describe.

    Raises:
      InputError: both or neither of steps and epochs are given, or the plan is
        impossible.
    """
    num_steps, num_epochs = plans.steps_and_epochs(
        flags["num_examples"],
        flags["batch_size"],
        epochs=flags["epochs"],
        num_steps=flags["num_steps"],
    )
    plan = DpSgdPlan(
        sampler=flags["sampler"],
        num_examples=flags["num_examples"],
        expected_batch_size=flags["batch_size"],
        num_steps=num_steps,
        num_epochs=num_epochs,
        truncated_batch_size=flags["truncated_batch_size"],
        bands=flags["bands"],
    )
    plans.check_epochs(plan)
    return plan
