"""Whether a model is fit for use: what a person should know beside its metrics.

Public: all of it, if the held-out examples need no protection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.model.metrics import LOWER_IS_BETTER, in_words

#: What a model without privacy is, which others are compared with.
PLAIN = (
    "Without privacy a model leaves out a tenth of the training rows, and is the "
    "iterate that is best on those."
)
AHEAD = (
    "A private model is ahead of it here: clip and noise also keep a model from "
    "learning rows by heart, and a private model trains on all rows."
)

#: A calibration error above which a model's probabilities mislead.
_FAR_OFF = 0.05


def notes_on_plain(
    metric: str, private: Iterable[float], plain: Iterable[float]
) -> list[str]:
    """Returns what a reader of private and plain results beside each other should know.

    Args:
      metric: Name of the metric.
      private: Its values of private models.
      plain: Its values without privacy, at least one.
    """
    sign = -1 if metric in LOWER_IS_BETTER else 1
    best = max(sign * value for value in plain)
    ahead = any(sign * value > best for value in private)
    return [PLAIN, *([AHEAD] if ahead else [])]


def warnings(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each way in which a model is not fit for use.

    Args:
      metrics: The metrics of a run, with those of ``guessing`` under that name.
    """
    constant = metrics.get("guessing") or {}
    for name, value in constant.items():
        found = metrics.get(name)
        if found is None or name == "accuracy":
            continue
        lower = name in LOWER_IS_BETTER
        if (found >= value) if lower else (found <= value):
            yield (
                f"The model is no better than guessing: {in_words(name)} {found:.4f}, "
                f"guessing {value:.4f}. Try more --epochs, a larger --batch-size, or a "
                "smaller --learning-rate."
            )
            return
    error, count = metrics.get("calibration_error"), metrics.get("num_examples")
    if error is not None and count and error > _FAR_OFF + 1 / math.sqrt(count):
        yield (
            f"Its probabilities are off by {error:.2f} on average: use its order, not "
            "its probabilities. Try a smaller --learning-rate, or --average ema."
        )
