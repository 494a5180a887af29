"""``dpsgd account`` and ``dpsgd audit``: of a run, or of a plan."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from cyclopts import Parameter

from accounting.cli.command import names_of, of_fields
from accounting.cli.options import (
    AllowLargeDelta,
    Json,
    LocalPath,
    Relation,
    Sampler,
    check_delta,
    warn,
)
from accounting.core import plan as plans
from accounting.core.plan import DpSgdPlan
from accounting.core.settings import OPTIONS, RARE, Field, OfPrivacy
from accounting.core.validation import InputError
from trainer.settings import methods
from trainer.settings.requests import LARGEST_TRIALS, Claim


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

    def plan(self, command: str, *others: str) -> DpSgdPlan:
        """Returns the plan that complete options describe.

        Args:
          command: Name of the command.
          *others: Names of further options that it requires.

        Raises:
          InputError: a required option is missing, both or neither of steps and epochs
            are given, or the plan is impossible.
        """
        for name in ("sampler", "num_examples", "batch_size", "delta", *others):
            if getattr(self, name) is None:
                raise InputError(
                    f"--{name.replace('_', '-')} is missing. Name a run, or give the "
                    f"options of a plan: see `dpsgd {command} --help`."
                )
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


def account(
    *runs: Annotated[LocalPath, Parameter(group=OPTIONS)],
    asked: Annotated[RunOrPlan, of_fields] = RunOrPlan(),
    l2_norm_clip: Annotated[float | None, RARE] = None,
    max_examples_per_user: Annotated[int | None, OfPrivacy] = None,
    relation: Annotated[Relation | None, RARE] = None,
    cross_check: bool = False,
    trade_off: bool = False,
    as_json: Json = False,
    **of_method: str,
) -> None:
    """State the epsilon of a run from its record, or that of a plan.

    Of several runs on one table it states that of all together, whatever was chosen
    from earlier ones, for a total that was fixed before the first: epsilons and deltas
    add, and runs that were declared together by --of-runs count once.

    For example, for a run, for two, and for a plan:
      dpsgd account run
      dpsgd account run-1 run-2
      dpsgd account --sampler poisson --num-examples 60000 --batch-size 600 \\
          --epochs 10 --noise-multiplier 1.1 --delta 1e-5 --cross-check

    Args:
      runs: Folders that `dpsgd train` wrote.
      l2_norm_clip: Required with settings of a method.
      max_examples_per_user: State epsilon for users with at most this many.
      relation: Neighbouring relation.  [default: zero-out]
      cross_check: Also state the epsilon by dp_accounting, and the event it is of.
      trade_off: Also bound the error rates of membership tests.
      of_method: Settings of a method with an accounting of its own: --mix-width,
        --linf-factor.
    """
    check_delta(asked.delta, asked.allow_large_delta)
    from trainer.cli import account_body

    what = account_body.Asked(
        delta=asked.delta,
        allow_large_delta=asked.allow_large_delta,
        cross_check=cross_check,
        trade_off=trade_off,
        relation=relation,
        max_examples_per_user=max_examples_per_user,
    )
    if runs:
        asked.refuse_plan(l2_norm_clip=l2_norm_clip, **of_method)
        if len(runs) == 1:
            fields, text = account_body.of_run(runs[0], what)
        else:
            fields, text = account_body.of_runs(runs, what)
    else:
        of_texts = methods.of_texts(of_method, lambda: names_of(account))
        plan = asked.plan("account", "noise_multiplier")
        noise = asked.noise_multiplier or 0.0
        fields, text = account_body.of_plan(plan, noise, of_texts, l2_norm_clip, what)
    print(json.dumps(fields, indent=2) if as_json else text)


def audit(
    run: Annotated[LocalPath | None, Parameter(group=OPTIONS)] = None,
    /,
    *,
    asked: Annotated[RunOrPlan, of_fields] = RunOrPlan(),
    claim: Claim = None,
    trials: Annotated[int | None, Field(ge=100, le=LARGEST_TRIALS)] = None,
    confidence: Annotated[float, Field(gt=0.5, lt=1), RARE] = 0.999,
    canary_rows: Annotated[int | None, OfPrivacy, RARE] = None,
    epsilon: Annotated[float | None, OfPrivacy] = None,
    max_examples_per_user: Annotated[int | None, OfPrivacy] = None,
    as_json: Json = False,
) -> int:
    """Attack a run's mechanism, and bound its epsilon from below.

    In each trial, one example (the canary) or its absence goes through the real sampler
    and the real noise, on worst-case data, and an optimal test guesses which.  The rate
    of correct guesses gives a lower bound on the mechanism's epsilon.  Every trial uses
    new keys; no data, batch or key of RUN is used, only its plan, noise and delta.

    If the privacy unit is a user, the canary has as many rows as the claim allows.

    The exit code is 1 if the claimed epsilon is refuted.

    For example, for a run, and for a shuffle that claims Poisson's epsilon:
      dpsgd audit run
      dpsgd audit --sampler dynamic-shuffle --claim poisson --num-examples 10000 \\
          --batch-size 100 --epochs 1 --epsilon 1.5 --delta 1e-5

    Args:
      run: Folder that `dpsgd train` wrote.
      claim: Test the epsilon of this sampler at the same noise.  [default: that of the
        audited sampler]
      trials: Number of trials.  [default: 20,000]
      confidence: Probability that a true claim is not called violated.
      canary_rows: Examples of the canary user.  With more than the claim allows, the
        audit shows what happens if users are not bounded.  [default: as many as it
        allows]
      epsilon: Instead of noise: the claim, which determines the noise.
      max_examples_per_user: For a plan: the claim is for a user with at most this many
        examples.
    """
    check_delta(asked.delta, asked.allow_large_delta)
    from pipelines.files.progress_bars import Bars
    from trainer import auditing
    from trainer.report.run_files import read_finished

    how: dict[str, Any] = {
        "claim": claim,
        "trials": trials,
        "confidence": confidence,
        "canary_rows": canary_rows,
    }
    if run is not None:
        asked.refuse_plan(epsilon=epsilon, max_examples_per_user=max_examples_per_user)
        settings = auditing.settings_of_run(
            *read_finished(run),
            delta=asked.delta,
            allow_large_delta=asked.allow_large_delta,
            **how,
        )
    else:
        settings = auditing.settings_of_plan(
            asked.plan("audit"),
            noise_multiplier=asked.noise_multiplier,
            epsilon=epsilon,
            delta=asked.delta or 0.0,
            max_examples_per_user=max_examples_per_user,
            **how,
        )
    warn(settings.delta, settings.plan.num_examples)
    with Bars({auditing.COUNTED: None}) as bars:
        report = auditing.audit(settings, progress=bars.update)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.show()
    return int(report.verdict.violated)
