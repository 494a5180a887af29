"""The picture of a trade-off: what tests of membership can achieve at most."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from accounting.plots import new_figure, save
from accounting.trade_off.bounds import TradeOff, percent_up

_COLOR = "#31688e"
_LEAST = 1e-6


def draw(found: TradeOff, title: str, path: Path) -> None:
    """Draws the largest true positive rate over the false positive rate, twice.

    Args:
      found: The trade-off that `bounds.trade_off` returned.
      title: Title of the picture.
      path: File of the picture; its suffix determines the format.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    figure, (left, right) = new_figure(9.6, 4.8, columns=2)
    axes_rates = (left, np.linspace(0, 1, 401)), (right, np.geomspace(_LEAST, 1, 401))
    for axes, rates in axes_rates:
        most = [found.true_positive_rate(float(rate)) for rate in rates]
        axes.plot(rates, most, color=_COLOR, label="the best test, at most")
        axes.fill_between(
            rates, most, 1, color=_COLOR, alpha=0.15, lw=0, label="impossible"
        )
        axes.plot(rates, rates, ":", color="0.5", label="mere guessing")
        axes.set_xlabel("false positive rate: unused rows called used")
        axes.set_ylabel("true positive rate: used rows called used")
        axes.spines[["top", "right"]].set_visible(False)
    left.set(xlim=(0, 1), ylim=(0, 1), title="all tests")
    right.set(xscale="log", yscale="log", xlim=(_LEAST, 1), ylim=(_LEAST, 1))
    right.set_title("tests that accuse few")
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3)
    advantage = f"membership advantage at most {percent_up(found.advantage)}"
    figure.suptitle(f"{title}\n{advantage}", size=10)
    save(figure, path)
