"""Commands about one run, and before it: statistics, evaluate, predict, report."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated, Any

from cyclopts import Parameter

from accounting.cli.options import AllowLargeDelta, Json, LocalPath, check_delta
from accounting.core.settings import REQUIRED, OfPrivacy, choice
from trainer.cli.metrics_text import metrics_text
from trainer.report.progress import Terminal
from trainer.settings.requests import AVERAGES, LAST
from trainer.settings.train_settings import WEIGHT_AVERAGES


def statistics(
    *,
    table: Annotated[str, Parameter(name="--input", group=REQUIRED)],
    schema: Annotated[LocalPath, Parameter(group=REQUIRED)],
    out: Annotated[LocalPath, Parameter(group=REQUIRED)],
    epsilon: Annotated[float, Parameter(group=REQUIRED)],
    delta: Annotated[float, Parameter(group=REQUIRED)],
    allow_large_delta: AllowLargeDelta = False,
    of_runs: Annotated[int, OfPrivacy, Parameter(metavar="N")] = 1,
    as_json: Json = False,
) -> None:
    """Find ranges and shares of classes, with an epsilon for them.

    A range makes a number in [-1, 1] of a column, which trains better than its
    logarithm, and must not be read off the rows.  Rows that train nothing pay for it:
    a model of other rows then has its epsilon, not a larger one.  A column whose range
    noise or bins of values hide gets none.  ± is one standard deviation of the noise.

    For example:
      dpsgd statistics --input first/val --schema schema.toml --out ranges.toml \\
          --epsilon 3 --delta 1e-6
      dpsgd prepare --input census.csv --schema ranges.toml --out data

    Args:
      table: Prepared rows that train nothing, such as the part `val` of `dpsgd
        prepare`: Parquet (a folder, a file or a quoted glob).
      schema: The schema that they were prepared with.
      out: New file: the schema with what is found, to prepare the table again with.
      epsilon: For one row of --input.
      delta: For one row of --input.
      of_runs: Of so many such statistics of these rows together.
    """
    check_delta(delta, allow_large_delta)
    from trainer.releases import table_statistics

    with Terminal("counting", unit="cell") as reporter:
        found = table_statistics.statistics(
            table,
            schema,
            out,
            epsilon=epsilon,
            delta=delta,
            of_runs=of_runs,
            allow_large_delta=allow_large_delta,
            reporter=reporter,
        )
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(_statistics_text(found))
    print(found["claim"])
    print(f"schema in {out}")


def _statistics_text(found: dict[str, Any]) -> str:
    if found["num_rows"] < found["least_rows"]:
        return (
            f"About {found['num_rows']:.0f} rows are fewer than the "
            f"{found['least_rows']} of which noise leaves something: nothing was "
            "found. Epsilon is spent."
        )
    width = max(map(len, [*found["columns"], "column"]))
    lines = [f"{'column':<{width}}{'low':>12}{'high':>12}{'log':>6}{'beyond':>9}"]
    for name, each in found["columns"].items():
        if each["low"] is None:
            lines.append(f"{name:<{width}}{'no range':>12}: {each['why_no_range']}")
            continue
        log = "yes" if each["log"] else "no"
        lines.append(
            f"{name:<{width}}{each['low']:>12.6g}{each['high']:>12.6g}{log:>6}"
            f"{each['beyond']:>9.1%}"
        )
    lines.append(
        "Beyond each end of a range are about so many of the values that are not "
        "missing; they are clipped to it."
    )
    shares = ", ".join(
        f"{each['share']:.2%} ± {each['stddev']:.2%}" for each in found["classes"]
    )
    return "\n".join(
        [*lines, *([f"Shares of the classes: {shares}."] if shares else [])]
    )


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
    as_json: Json = False,
) -> None:
    """Evaluate a run on held-out rows, with an epsilon for them.

    AUC, log loss and accuracy, or squared and absolute error of a number,
    come from one Gaussian release, with intervals that include its noise.  Held-out
    rows are others than training rows, so model and metrics together have the larger
    epsilon of both, not the sum.  If RUN is about users, those of held-out rows are
    bounded by `dpsgd prepare`, too.  Losses above 4 count as 4; errors of a number are
    bounded by the range of its label, which it needs.

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
    """
    check_delta(delta, allow_large_delta)
    from trainer.releases import evaluate as releases

    with Terminal("evaluating", unit="row") as reporter:
        metrics = releases.evaluate(
            run,
            batches,
            table,
            epsilon=epsilon,
            delta=delta,
            allow_large_delta=allow_large_delta,
            average=average,
            reporter=reporter,
        )
    if as_json:
        print(json.dumps(metrics, indent=2))
        return
    print(metrics_text(metrics))
    print(metrics["evaluation"]["claim"])


def predict(
    run: LocalPath,
    /,
    *,
    table: Annotated[LocalPath, Parameter(name="--input", group=REQUIRED)],
    out: Annotated[LocalPath, Parameter(group=REQUIRED)],
    average: Annotated[str | None, choice("average", *AVERAGES)] = None,
    uncertainty: Annotated[float | None, Parameter(metavar="LEVEL")] = None,
    carry: Annotated[tuple[str, ...], Parameter(metavar="COLUMN")] = (),
    as_json: Json = False,
) -> None:
    """Predict every row of a table with a finished run.

    Of classes, column `predicted` has the predicted one, by the names of the schema.
    Predictions cost no privacy: they are computed from the released weights.

    For example, for a prepared and a raw table, and with intervals:
      dpsgd predict run --input data/test --out predictions.parquet
      dpsgd predict run --input new.csv --out scores.csv --carry customer
      dpsgd predict averaged-run --input data/test --out intervals.parquet \\
          --uncertainty 0.95

    Args:
      run: Folder of the run.
      table: File, folder or quoted glob, prepared like the batches.  If these were made
        with a schema, also a raw table (CSV, TSV, JSON lines, Parquet).  A label is not
        needed.
      out: New file, with one row for each row of --input, in order: CSV if its name
        ends in .csv, else Parquet.
      average: Weights to predict with: last; ema or uta, averaged while training;
        past_ema, upa, opa or omv, of kept iterates.  [default: last; opa with
        --uncertainty]
      uncertainty: Also write intervals of this level, such as 0.95, from kept iterates:
        how much a prediction varies with the noise.
      carry: Column of --input to copy to --out, such as an id; may be repeated.
    """
    from trainer.prediction import predict as prediction

    with Terminal("predicting", unit="") as reporter:
        summary = prediction.predict(
            run,
            table,
            out,
            average=average,
            uncertainty=uncertainty,
            carry=carry,
            reporter=reporter,
        )
    if as_json:
        print(json.dumps(summary.to_json(), indent=2))
        return
    print(
        f"{summary.num_rows:,} predictions by {summary.average}, columns "
        f"{', '.join(summary.columns)}, in {summary.out}"
    )


def report(
    run: LocalPath,
    /,
    *,
    out: LocalPath = pathlib.Path("report.html"),
    force: bool = False,
    title: str | None = None,
    together: Annotated[str, Parameter(metavar="CLAIM")] = "",
    delta: Annotated[float | None, OfPrivacy] = None,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page about a run, to show to others.

    The page has the privacy statement in plain words and in full, what is not covered,
    plan, batches, model, held-out metrics, and how to verify all of it.  It is made
    from the public files of RUN and needs no network, so you can mail or publish it.

    With --json the same facts go to standard output, and no page is written.

    For example:
      dpsgd report run --title "Who clicks? Model of May 2026"
      dpsgd report run --delta 1e-8 --out for-review.html

    Args:
      run: Folder that `dpsgd train` wrote.
      out: The HTML file to write.
      force: Replace an existing file.
      title: Title of the page.  [default: the name of the run's folder]
      together: Claim of all that was released with the run, such as that of `dpsgd
        fit`.
      delta: By default the one the run was trained for.
    """
    check_delta(delta, allow_large_delta)
    options: dict[str, Any] = {
        "title": title,
        "together": together,
        "delta": delta,
        "allow_large_delta": allow_large_delta,
    }
    if as_json:
        from trainer.html_report.facts import collect

        print(json.dumps(collect(run, **options), indent=2))
        return
    from trainer.html_report.page import write_report

    write_report(run, out, overwrite=force, **options)
    print(f"report: {out}")
