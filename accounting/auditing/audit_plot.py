"""The picture of an audit: error rates found, and those that the claim allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from accounting.auditing.audit import USUAL_CONFIDENCE, Verdict, percent
from accounting.plots import new_figure, save

_CLAIMED, _FOUND, _BAD = "#31688e", "#d95f02", "#b2182b"


def draw(verdict: Verdict, title: str, path: Path) -> None:
    """Draws the errors twice: as a trade-off, and where false positives are rare.

    No test may have errors in the shaded regions if the claim is true.

    Args:
      verdict: What the trials say.
      title: Above the picture.
      path: Of the picture; the suffix says the format.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    figure, (left, right) = new_figure(9.6, 4.8, columns=2)
    least = 0.5 / verdict.trials
    fpr = np.geomspace(least, 1.0, 500)
    fnr = verdict.claim.profile.least_fnr(fpr)
    claimed = f"claimed: epsilon {verdict.claim.epsilon:.4g} at {verdict.claim.delta:g}"
    left.plot(fpr, fnr, color=_CLAIMED, label=claimed)
    left.fill_between(fpr, 0, fnr, color=_CLAIMED, alpha=0.15)
    left.text(0.04, 0.04, "impossible if the claim is true", color=_CLAIMED)
    left.plot(fpr, 1 - fpr, ":", color="0.5", label="perfect privacy")
    right.plot(fpr, 1 - fnr, color=_CLAIMED)
    right.fill_between(fpr, 1 - fnr, 1, color=_CLAIMED, alpha=0.15)
    right.plot(fpr, fpr, ":", color="0.5")
    false = np.array([point.fpr for point in verdict.points])
    missed = np.array([point.fnr for point in verdict.points])
    _add_points(left, false, missed)
    # Of the rate of what is found, bounds are in the opposite order.
    _add_points(right, np.maximum(false, least), np.maximum(1 - missed[:, ::-1], least))
    left.set(xlim=(0, 1), ylim=(0, 1), xlabel="ghosts taken for the example")
    left.set_ylabel("the example taken for a ghost")
    right.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1))
    right.set_xlabel("ghosts taken for the example")
    right.set_ylabel("the example recognised")
    left.legend(frameon=False, loc="upper right", fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    color = _BAD if verdict.violated else "black"
    figure.suptitle(f"{title}\n{verdict.text}", size=10, color=color)
    save(figure, path)


def _add_points(axes: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Draws rates with intervals; columns are low, rate, high."""

    def bars(rates: np.ndarray) -> np.ndarray:
        return np.stack([rates[:, 1] - rates[:, 0], rates[:, 2] - rates[:, 1]])

    axes.errorbar(
        x[:, 1],
        y[:, 1],
        xerr=bars(x),
        yerr=bars(y),
        fmt="o",
        markersize=3,
        linewidth=0.8,
        color=_FOUND,
        label=f"found, with {percent(USUAL_CONFIDENCE)} intervals",
    )
