"""Options that `account` and `audit` share: a run, or a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from accounting.cli.options import AllowLargeDelta, Sampler
from accounting.core import plan as plans
from accounting.core.plan import DpSgdPlan
from accounting.core.settings import RARE, OfPrivacy
from accounting.core.validation import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOrPlan:
    """Options of a plan, which a run has in its record.

    Attributes:
      delta: For a run, by default the one it was trained for.
      sampler: Sampler of a plan.
      num_examples: Number of examples or slots in the data set.
      batch_size: Expected batch size.
      truncated_batch_size: For truncated Poisson.
      bands: Groups of the examples of cyclic samplers.
      num_steps: Number of steps.
      epochs: Instead of --num-steps: epochs of n/b steps.
      noise_multiplier: Noise standard deviation over the clip norm.
    """

    delta: Annotated[float | None, OfPrivacy] = None
    allow_large_delta: AllowLargeDelta = False
    sampler: Sampler | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    truncated_batch_size: int | None = None
    bands: Annotated[int | None, RARE] = None
    num_steps: int | None = None
    epochs: int | None = None
    noise_multiplier: Annotated[float | None, OfPrivacy] = None

    def refuse_plan(self, **others: Any) -> None:
        """Refuses options of a plan beside a run.

        Args:
          **others: Further options that are none of a run.

        Raises:
          InputError: one of them is given.
        """
        of_runs = ("delta", "allow_large_delta")
        for name, value in {**vars(self), **others}.items():
            if value is not None and name not in of_runs:
                raise InputError(
                    f"A run takes no --{name.replace('_', '-')}: its manifest and "
                    "record say what was executed. Omit it."
                )

    def check_complete(self, names: Sequence[str], *, command: str) -> None:
        """Refuses incomplete options of a plan.

        Args:
          names: Names of the required options.
          command: Name of the command.

        Raises:
          InputError: a required option is missing.
        """
        for name in names:
            if getattr(self, name) is None:
                raise InputError(
                    f"--{name.replace('_', '-')} is missing. Name a run, or give the "
                    f"options of a plan: see `dpsgd {command} --help`."
                )

    def plan(self) -> DpSgdPlan:
        """Returns the plan that complete options describe.

        Raises:
          InputError: both or neither of steps and epochs are given, or the plan is
            impossible.
        """
        assert self.sampler is not None
        assert self.num_examples is not None
        assert self.batch_size is not None
        num_steps, num_epochs = plans.steps_and_epochs(
            self.num_examples,
            self.batch_size,
            epochs=self.epochs,
            num_steps=self.num_steps,
        )
        plan = DpSgdPlan(
            sampler=self.sampler,
            num_examples=self.num_examples,
            expected_batch_size=self.batch_size,
            num_steps=num_steps,
            num_epochs=num_epochs,
            truncated_batch_size=self.truncated_batch_size,
            bands=self.bands,
        )
        plans.check_epochs(plan)
        return plan
