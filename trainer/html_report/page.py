"""A privacy report as one self-contained HTML file.

The page fetches nothing: it has no script, no link to a file and no font, its content
security policy forbids all of them, and its picture is in it.  Text of files is
escaped, so that a name cannot become markup.  Upper bounds are rounded up, lower bounds
down, and other numbers to four digits.  The file appears complete or not at all, and
replaces another one only on request.

Public: everything, see ``facts``.
"""

from __future__ import annotations

import base64
import decimal
import fractions
import functools
import math
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jinja2

from accounting.core.claim import RELIANCES
from accounting.profiles import percent_up
from accounting.statement import CERTIFIED, EVALUATION
from pipelines.files.outputs import check_new, output_file
from pipelines.files.storage import StrPath
from trainer.core import claim_names
from trainer.html_report import facts
from trainer.report.report import plot_curve

_TEMPLATE = "report.html.jinja"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def write_report(
    run: StrPath,
    out: StrPath,
    *,
    title: str | None = None,
    together: str = "",
    delta: float | None = None,
    allow_large_delta: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the privacy report of a run, and returns its content, JSON-serialisable.

    Args:
      run: Folder of a finished run.
      out: The HTML file to write.
      title: Title of the page; by default it names the run's folder.
      together: Claim of all that was released with the run, as `dpsgd fit` makes it.
      delta: Delta to state epsilon at; that of the run if None.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      overwrite: Whether the page may replace another file.

    Raises:
      InputError: ``out`` cannot be written, or the run is not finished or was edited.
    """
    path = pathlib.Path(out)
    check_new(
        path,
        overwrite=overwrite,
        remedy="Choose another, or add --force (in Python overwrite=True).",
    )
    found = facts.collect(
        pathlib.Path(run),
        title=title,
        together=together,
        delta=delta,
        allow_large_delta=allow_large_delta,
    )
    with output_file(path, overwrite=overwrite) as write:
        write(render(found).encode())
    return found


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trainer", "html_report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    return environment.get_template(_TEMPLATE)


def render(found: dict[str, Any]) -> str:
    """Returns the page of the content that ``facts.collect`` returned."""
    return _template().render(
        **found,
        picture=_picture(found["evaluation"]),
        certified=CERTIFIED,
        of_evaluation=EVALUATION,
        selection=claim_names.SELECTION,
        reliances={**RELIANCES, **claim_names.CLAIMS},
    )


def _picture(evaluation: dict[str, Any] | None) -> str:
    """Returns the curves as PNG in base64; empty for fewer than two points."""
    points = evaluation["curve"] if evaluation else []
    if len(points) < 2:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "curve.png")
        plot_curve(points, path, title="")
        return base64.b64encode(path.read_bytes()).decode()


def _rounded(side: Callable[[float], int]) -> Callable[[float | None, int], str]:
    def text(value: float | None, digits: int = 4) -> str:
        if value is None or not math.isfinite(value):
            return "unknown"
        return f"{side(value * 10**digits) / 10**digits:.{digits}f}"

    return text


def _scientific_up(value: float | decimal.Decimal) -> str:
    """Returns a number in scientific notation, rounded up to three digits.

    Example:
      >>> _scientific_up(2.0833e-06)
      '2.09 × 10⁻⁶'
    """
    # From its decimal digits: a product of floats may round down.
    exact = decimal.Decimal(str(value))
    up = _decimals(3).plus(exact)
    digits, exponent = f"{up:.2e}".split("e")
    power = str(int(exponent)).translate(_SUPERSCRIPTS)
    return f"{digits} \N{MULTIPLICATION SIGN} 10{power}"


def _factor_up(epsilon: float) -> str:
    """Returns e to the power of epsilon as text, rounded up.

    Example:
      >>> _factor_up(1.0), _factor_up(1486.8)
      ('2.72', '5.12 × 10⁶⁴⁵')
    """
    factor = _decimals(28).exp(decimal.Decimal(epsilon))  # of any size
    if factor >= 1e6:
        return _scientific_up(factor)
    return f"{math.ceil(factor * 100) / 100:,.2f}"


def _decimals(digits: int) -> decimal.Context:
    """Returns decimal numbers of any size, which are rounded up."""
    return decimal.Context(digits, decimal.ROUND_UP, Emax=decimal.MAX_EMAX)


def _one_in(probability: float) -> str:
    """Returns a probability as "one in n", which is at least as large.

    Example:
      >>> _one_in(3e-6), _one_in(1e-5)
      ('one in 333,333', 'one in 100,000')
    """
    # From its decimal digits: the double 1e-5 is a little more than 1 / 100,000.
    return f"one in {math.floor(1 / fractions.Fraction(repr(probability))):,}"


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items()) or "none"
    return str(value)


_FILTERS = {
    "up": _rounded(math.ceil),
    "down": _rounded(math.floor),
    "percent_up": percent_up,
    "factor_up": _factor_up,
    "scientific_up": _scientific_up,
    "one_in": _one_in,
    "plain": _plain,
    "title_of": facts.title_of,
}
