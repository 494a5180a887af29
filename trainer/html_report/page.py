"""A privacy report as one self-contained HTML file.

Formal guarantees:
  - Nothing is fetched: the page has no script, no link to a file and no font, and its
    content security policy forbids all of them.
  - Text of files is escaped: a name cannot become markup.
  - Upper bounds are rounded up, lower bounds down; other numbers to four digits.
  - The file appears complete or not at all, and replaces another only on request.

Public: everything, see ``facts``.
"""

from __future__ import annotations

import dataclasses
import decimal
import fractions
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from matplotlib.ticker import MaxNLocator

from accounting.core.claim import RELIANCES
from accounting.statement import CERTIFIED, EVALUATION
from accounting.trade_off import percent_up
from pipelines.files.outputs import check_new, output_file
from pipelines.files.storage import StrPath
from trainer.core import claim_names
from trainer.html_report import facts

#: Beside the axes there is room for a label such as 1,000,000, or half of it.
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 304, 14, 170
_LONGEST_LABEL = 9


@dataclasses.dataclass(frozen=True)
class Tick:
    """A mark on an axis: its coordinate and label."""

    place: float
    label: str


@dataclasses.dataclass(frozen=True)
class LineChart:
    """One curve.

    Attributes:
      points: Coordinates (x, y) of the known points.
      x_ticks: Ticks of the horizontal axis.
      y_ticks: Ticks of the vertical axis.
      left: Start of the horizontal axis.
      right: End of the horizontal axis.
    """

    points: tuple[tuple[float, float], ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    left: float = _LEFT
    right: float = _RIGHT

    @property
    def path(self) -> str:
        """The points as SVG writes them."""
        return " ".join(f"{x},{y}" for x, y in self.points)


def line_chart(
    x_values: Sequence[float], y_values: Sequence[float | None]
) -> LineChart | None:
    """Returns the chart of a curve; None if fewer than two points are known.

    Args:
      x_values: Steps, ascending.
      y_values: Metric at each step; None where it is not defined.
    """
    known = [(x, y) for x, y in zip(x_values, y_values, strict=True) if y is not None]
    if len(known) < 2:
        return None
    x_axis = _Axis([x for x, _ in known], _LEFT, _RIGHT, of_steps=True)
    y_axis = _Axis([y for _, y in known], _BOTTOM, _TOP)
    return LineChart(
        points=tuple((x_axis.place(x), y_axis.place(y)) for x, y in known),
        x_ticks=x_axis.ticks,
        y_ticks=y_axis.ticks,
    )


class _Axis:
    """Maps values to coordinates."""

    def __init__(
        self,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        of_steps: bool = False,
    ) -> None:
        low, high = min(values), max(values)
        # A line that hardly moves looks flat, and its labels are short.
        least = abs(low) / 100 or 1.0
        if not of_steps and high - low < least:
            low, high = (low + high - least) / 2, (low + high + least) / 2
        locator = MaxNLocator(nbins=4, integer=of_steps, steps=[1, 2, 2.5, 5, 10])
        ticks = [float(value) for value in locator.tick_values(low, high)]
        if of_steps:
            ticks = [tick for tick in ticks if low <= tick <= high]
        else:
            low, high = ticks[0], ticks[-1]
        self._values, self._low, self._high = ticks, low, high
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        part = (value - self._low) / (self._high - self._low)
        return round(self._start + part * (self._end - self._start), 1)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        step = self._values[1] - self._values[0]
        # Enough decimals to tell ticks apart; a step of 2.5 needs one more.
        digits = max(0, -math.floor(math.log10(step)))
        digits += not math.isclose(step * 10**digits, round(step * 10**digits))
        return tuple(
            Tick(self.place(value), _label(value, digits)) for value in self._values
        )


def _label(value: float, digits: int) -> str:
    text = f"{value:,.{digits}f}"
    return text if len(text) <= _LONGEST_LABEL else f"{value:.3g}"


_TEMPLATE = "report.html.jinja"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def write_report(
    run: StrPath,
    out: StrPath,
    *,
    title: str | None = None,
    together: str = "",
    audit: StrPath | None = None,
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
      audit: File with the output of ``dpsgd audit RUN --json``; None for none.
      delta: Delta to state epsilon at; that of the run if None.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      overwrite: Whether the page may replace another file.

    Raises:
      InputError: ``out`` cannot be written, the run is not finished or was edited, or a
        file is of another run.
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
        audit=_path(audit),
        delta=delta,
        allow_large_delta=allow_large_delta,
    )
    with output_file(path, overwrite=overwrite) as write:
        write(render(found).encode())
    return found


def _path(path: StrPath | None) -> pathlib.Path | None:
    return None if path is None else pathlib.Path(path)


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
        charts=_charts(found["evaluation"]),
        certified=CERTIFIED,
        of_evaluation=EVALUATION,
        selection=claim_names.SELECTION,
        reliances={**RELIANCES, **claim_names.CLAIMS},
    )


def _charts(evaluation: dict[str, Any] | None) -> dict[str, LineChart]:
    if evaluation is None:
        return {}
    curve = evaluation["curve"]
    drawn = {
        name: line_chart(curve["step"], values)
        for name, values in curve["metrics"].items()
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}


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
