"""``dpsgd report``."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated, Any

from cyclopts import Parameter

from accounting.cli.options import AllowLargeDelta, Json, LocalPath, check_delta
from accounting.core.settings import OfPrivacy


def report(
    run: LocalPath,
    /,
    *,
    out: LocalPath = pathlib.Path("report.html"),
    force: bool = False,
    title: str | None = None,
    together: Annotated[str, Parameter(metavar="CLAIM")] = "",
    audit: LocalPath | None = None,
    delta: Annotated[float | None, OfPrivacy] = None,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page about a run, to show to others.

    The page has the privacy statement in plain words and in full, what is not covered,
    plan, batches, model, held-out metrics, and how to verify all of it.  It is made
    from the public files of RUN and needs no network, so you can mail or publish it.

    With --json the same facts go to standard output, and no page is written.

    For example, with a title, and with an audit:
      dpsgd report run --title "Who clicks? Model of May 2026"
      dpsgd audit run --json > audit.json
      dpsgd report run --audit audit.json --out audited.html

    Args:
      run: Folder that `dpsgd train` wrote.
      out: The HTML file to write.
      force: Replace an existing file.
      title: Title of the page.  [default: the name of the run's folder]
      together: Claim of all that was released with the run, such as that of `dpsgd
        fit`.
      audit: Include an audit of the run: the output of `dpsgd audit RUN --json`.
      delta: By default the one the run was trained for.
    """
    check_delta(delta, allow_large_delta)
    options: dict[str, Any] = {
        "title": title,
        "together": together,
        "audit": audit,
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
