"""``dpsgd statistics``."""

from __future__ import annotations

import json
from typing import Annotated, Any

from cyclopts import Parameter

from accounting.cli.options import AllowLargeDelta, Json, LocalPath, check_delta
from accounting.core.settings import REQUIRED, OfPrivacy
from trainer.report.progress import Terminal


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
    a model of other rows then has its epsilon, not a larger one.  ± is one standard
    deviation of the noise, and for a mean also what bins of values hide; values beyond
    a range count in the mean as its end.  A column whose range noise or bins hide gets
    none.

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

    request = table_statistics.check(
        table=table,
        schema=schema,
        out=out,
        epsilon=epsilon,
        delta=delta,
        allow_large_delta=allow_large_delta,
        of_runs=of_runs,
    )
    with Terminal("counting", unit="cell") as reporter:
        found = table_statistics.statistics_checked(request, reporter)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(_text(found))
    print(found["claim"])
    print(f"schema in {out}")


def _text(found: dict[str, Any]) -> str:
    if found["num_rows"] < found["least_rows"]:
        return (
            f"About {found['num_rows']:.0f} rows are fewer than the "
            f"{found['least_rows']} of which noise leaves something: nothing was "
            "found. Epsilon is spent."
        )
    width = max(map(len, [*found["columns"], "column"]))
    numbers = f"{'low':>12}{'high':>12}{'log':>6}{'missing':>10}"
    lines = [f"{'column':<{width}}{numbers}{'mean':>21}{'beyond':>18}"]
    for name, each in found["columns"].items():
        missing = f"{each['missing']:>10.2%} ± {each['stddev_of_missing']:.2%}"
        if each["low"] is None:
            lines.append(
                f"{name:<{width}}{'no range':>30}{missing}: {each['why_no_range']}"
            )
            continue
        log = "yes" if each["log"] else "no"
        lines.append(
            f"{name:<{width}}{each['low']:>12.6g}{each['high']:>12.6g}{log:>6}"
            f"{missing}{each['mean']:>13.5g} ± {each['stddev_of_mean']:.2g}"
            f"{each['beyond']:>11.1%} ± {each['stddev_of_beyond']:.2%}"
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
