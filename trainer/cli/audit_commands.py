"""``dpsgd audit``: lower bounds on epsilon, by attacking the mechanism itself."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from accounting.cli.command import of_fields
from accounting.cli.options import Json, LocalPath, Plot, check_delta
from accounting.core.settings import OPTIONS, RARE, Field, OfPrivacy
from trainer.cli.run_or_plan import RunOrPlan
from trainer.settings.requests import LARGEST_TRIALS, Claim


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
    plot: Plot = None,
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
          --batch-size 100 --epochs 1 --epsilon 1.5 --delta 1e-5 --plot audit.png

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
      plot: Draw the result, such as to a.png.
    """
    check_delta(asked.delta, asked.allow_large_delta)
    from trainer.cli import audit_body

    how = {
        "claim": claim,
        "trials": trials,
        "confidence": confidence,
        "canary_rows": canary_rows,
    }
    if run is not None:
        asked.refuse_plan(epsilon=epsilon, max_examples_per_user=max_examples_per_user)
        settings = audit_body.of_run(run, asked, how)
    else:
        settings = audit_body.of_plan(asked, how, epsilon, max_examples_per_user)
    report = audit_body.report(settings, plot)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.show()
    return int(report.verdict.violated)
