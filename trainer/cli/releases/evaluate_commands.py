"""``dpsgd evaluate``."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from accounting.cli.options import AllowLargeDelta, Json, LocalPath, check_delta
from accounting.core.settings import REQUIRED, OfPrivacy, choice
from trainer.cli.metrics_text import metrics_text
from trainer.report.progress import Terminal
from trainer.settings.aggregation_settings import WEIGHT_AVERAGES
from trainer.settings.requests import LAST


def evaluate(
    run: LocalPath,
    /,
    *,
    batches: Annotated[LocalPath, Parameter(group=REQUIRED)],
    table: Annotated[LocalPath, Parameter(name="--input", group=REQUIRED)],
    epsilon: Annotated[float | None, OfPrivacy] = None,
    delta: Annotated[float | None, OfPrivacy] = None,
    allow_large_delta: AllowLargeDelta = False,
    average: Annotated[str | None, choice("average", LAST, *WEIGHT_AVERAGES)] = None,
    largest_loss: Annotated[float | None, Parameter(metavar="LOSS")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run on held-out rows, with an epsilon for them.

    AUC, log loss, accuracy and calibration, or squared and absolute error of a number,
    come from one Gaussian release, with intervals that include its noise.  Held-out
    rows are others than training rows, so model and metrics together have the larger
    epsilon of both, not the sum.  If RUN is about users, those of held-out rows are
    bounded by `dpsgd prepare`, too.

    Train RUN without --eval: its metrics are published without protection.

    For example:
      dpsgd train --batches batches --out run --epsilon 3 --delta 1e-7
      dpsgd evaluate run --batches batches --input data/test --epsilon 1

    Args:
      run: Folder of the run.
      batches: Folder of the batches of RUN: files that they were sampled from are
        refused as --input.
      table: Held-out rows: Parquet (a folder, a file or a quoted glob) with the columns
        of the batches, such as a split of `dpsgd prepare`.  None may be a training row.
      epsilon: Of the metrics, for one held-out row or user.  [default: that of RUN]
      delta: Of RUN and metrics.  [default: that of RUN]
      average: Weights to evaluate: see `dpsgd predict`.  [default: last]
      largest_loss: Count larger losses as this one, which must not be chosen by the
        rows.  [default: 4 for two classes; of a regression the squared range of its
        labels]
    """
    check_delta(delta, allow_large_delta)
    from trainer.releases import evaluate as releases

    request = releases.check(
        run=run,
        batches=batches,
        table=table,
        epsilon=epsilon,
        delta=delta,
        allow_large_delta=allow_large_delta,
        average=average,
        largest_loss=largest_loss,
    )
    with Terminal("evaluating", unit="row") as reporter:
        reporter.say("loading TensorFlow")
        metrics = releases.evaluate_checked(request, reporter)
    if as_json:
        print(json.dumps(metrics, indent=2))
        return
    print(metrics_text(metrics))
    print(metrics["evaluation"]["claim"])
