"""Coordinates of line charts, in the template's picture of 340 by 210, y downwards.

The horizontal axis ends at the last step; the vertical one at its outermost ticks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

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
