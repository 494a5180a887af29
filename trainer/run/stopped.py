"""The statement of a run that stopped before its plan ended.

The weights after k of T steps are a function of the iterates after 1, ..., T steps.  So
the epsilon of the whole plan bounds the release, even if released iterates, for example
their validation metrics, decided when to stop.  The epsilon of k steps does not: it is
for a k that is fixed in advance.

Formal guarantees:
  - ``check`` refuses a run that metrics of training examples may have stopped, and a
    method whose guarantee is not that of released noisy sums.
  - A ``StoppedStatement`` claims the epsilon of the whole plan, and says so.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from accounting.core.validation import InputError
from accounting.statement import PrivacyStatement
from trainer.core.run.run_record import RunRecord
from trainer.settings import methods


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoppedStatement(PrivacyStatement):
    """A privacy claim for the first steps of a plan.

    Attributes:
      num_steps_executed: Number of executed steps.
    """

    num_steps_executed: int

    @property
    def stopped(self) -> str:
        """The number of executed steps, and why epsilon is that of the whole plan."""
        return (
            f"after {self.num_steps_executed:,} of T={self.plan.num_steps:,} steps; "
            "epsilon is of all T, which bounds every prefix, also where released "
            "iterates decided when to stop; a smaller one needs a number of steps "
            "that is fixed beforehand"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        return {
            **super().to_json(),
            "num_steps_executed": self.num_steps_executed,
            "stopped": self.stopped,
        }

    def to_text(self) -> str:
        """Returns the statement as a few lines of text."""
        claim, newline, rest = super().to_text().partition("\n")
        return f"{claim}{newline}  stopped     {self.stopped}.\n{rest}"


def check(record: RunRecord) -> None:
    """Refuses, by an InputError, an incomplete run whose steps have no statement."""
    done = f"the run stopped after step {record.num_steps_executed}"
    if not methods.get(record.method).has_dp_sgd_accounting:
        raise InputError(
            f"Expected a run of all steps of its plan for method={record.method!r}, "
            f"whose guarantee is of the whole run; {done}. Train to the end."
        )
    if any(fit["non_private_training_metrics"] for fit in record.fits):
        raise InputError(
            f"Expected a run of all steps of its plan; {done}, and metrics of training "
            "examples, which epsilon does not cover, may have stopped it. Call fit() "
            "for the steps that are left, or start again without "
            "non_private_training_metrics."
        )


def statement_of(whole: PrivacyStatement, record: RunRecord) -> StoppedStatement:
    """Returns the statement of the first steps of a plan; see `run_statement`.

    Args:
      whole: Statement of the whole plan.
    """
    fields = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
    return StoppedStatement(**fields, num_steps_executed=record.num_steps_executed)
