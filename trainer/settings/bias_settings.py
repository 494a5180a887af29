"""Settings of the diagnostics of clipping."""

from __future__ import annotations

import dataclasses
import pathlib

from accounting.validation import InputError
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.request import Request
from trainer.settings.train_settings import DENSE_NOISE, LAZY_NOISE, TrainSettings

#: File in the private folder of a run, and its measurements of every step.
CLIPPING_BIAS_NAME = "non_private_clipping_bias.csv"
COLUMNS = ("magnitude", "direction", "bias", "cosine", "ascent_cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasSettings:
    """Methods whose clipping bias is measured, each in a run of its own.  All public.

    Attributes:
      batches: Folder that ``dpsgd batches`` wrote.
      held_out: Folder of held-out examples, as for ``dpsgd train``.
      out: New folder, or that of the same diagnostics.
      trained: Settings of one run per method; every method clips.
      data_is_public: Whether the user declares the training examples public.  The
        measurements are functions of them without noise.
    """

    batches: pathlib.Path
    held_out: pathlib.Path
    out: pathlib.Path
    trained: tuple[TrainSettings, ...]
    data_is_public: bool = False

    def __post_init__(self) -> None:
        if not self.data_is_public:
            raise InputError(
                "Expected data_is_public (--data-is-public): the bias of clipping is "
                "computed from the examples without noise, and no epsilon covers it. "
                "Give it for public data alone."
            )
        found = [each.method for each in self.trained]
        if not found or len(set(found)) < len(found):
            raise InputError(
                f"Expected each method once; got {', '.join(found) or 'none'}."
            )
        for each in self.trained:
            _check(each)
        self.requests()

    def requests(self) -> list[Request]:
        """Returns one run per method.

        Raises:
          InputError: a folder is not on this machine.
        """
        return [
            Request(
                settings=dataclasses.replace(
                    each, non_private_diagnostics=True, embedding_noise=DENSE_NOISE
                ),
                batches=self.batches,
                held_out=self.held_out,
                run=self.out / "runs" / each.method,
            )
            for each in self.trained
        ]


def _check(training: TrainSettings) -> None:
    if training.method == NON_PRIVATE:
        raise InputError(
            "Expected no method='non-private': nothing is clipped. Omit it."
        )
    if training.embedding_noise == LAZY_NOISE:
        raise InputError(
            "Expected no --embedding-noise lazy: rows that wait for their noise would "
            "be measured without it. Omit it for dense noise."
        )
