"""`dpsgd.plan` and `dpsgd.account`: the questions of epsilon and noise, in Python.

for answer in dpsgd.plan(num_examples=46_000_000, batch_size=65_536, epochs=1,
                         epsilon=3, delta=1e-9):
    print(answer.plan.sampler, answer.proven)   # noise that suffices
print(dpsgd.account("run"))                     # what a finished run guarantees
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accounting.comparison import Answer, Question, answer, is_answered
from accounting.core import sampler_registry
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import steps_and_epochs
from accounting.core.validation import check_claimed_delta

if TYPE_CHECKING:
    from accounting.statement import PrivacyStatement


def plan(
    *,
    num_examples: int,
    batch_size: int,
    delta: float,
    epochs: int | None = None,
    num_steps: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    samplers: Sequence[str] = (),
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> list[Answer]:
    """Returns the noise, or epsilon, of each sampler: see `dpsgd plan --help`.

    Args:
      num_examples: Slots of the data set.
      batch_size: Expected examples of a step.
      delta: Below 0.01.
      epochs: Passes over the data.
      num_steps: Steps in all, in place of epochs.
      epsilon: Target; the answers are noise multipliers.
      noise_multiplier: Noise over the clip norm; the answers are epsilons.
      samplers: Names of samplers; by default all that need no further choice.
      neighboring_relation: Zero-out by default.
      max_examples_per_user: k; above 1 the answers are for all examples of a user.

    Raises:
      InputError: a value out of range, or nothing is proven for a named sampler.

    Example:
      >>> (found,) = plan(num_examples=1000, batch_size=10, epochs=1, epsilon=1,
      ...                 delta=1e-6, samplers=["deterministic"])
      >>> round(found.proven, 3)
      4.225
    """
    check_claimed_delta(delta)
    steps, passes = steps_and_epochs(
        num_examples, batch_size, epochs=epochs, num_steps=num_steps
    )
    question = Question(
        num_examples=num_examples,
        expected_batch_size=batch_size,
        num_steps=steps,
        num_epochs=passes,
        delta=delta,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
    )
    names = samplers or [
        name for name in sampler_registry.names() if is_answered(question, name)
    ]
    return [answer(question, name) for name in names]


def account(
    run: str | os.PathLike[str], *, delta: float | None = None
) -> PrivacyStatement:
    """Returns what a finished run guarantees, computed from what was executed.

    Args:
      run: Folder of the run.
      delta: Delta to state; that of the run by default.

    Raises:
      InputError: the run is not finished, or its record is refused.
    """
    from pipelines.batches.folder import read_certificate
    from trainer.report.run_files import read_finished
    from trainer.run.privacy import run_statement

    folder = pathlib.Path(run)
    record, manifest = read_finished(folder)
    certificate = read_certificate(folder)
    found: PrivacyStatement = run_statement(
        record, manifest, delta=delta, certificate=certificate
    )
    return found
