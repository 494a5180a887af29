"""The memory of a run does not depend on its expected batch size."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.run.whole_runs import child_of
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings

PHYSICAL = 1024

_PEAK = """
    import resource
    from trainer.train import train

    train(request)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.thorough
def test_peak_memory_does_not_depend_on_the_logical_batch_size(
    batch_folder: Callable[..., Any],
    rows: Callable[..., Any],
    held_out: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    peaks, data = [], rows(65_536)
    for size in (PHYSICAL, 65_536):
        folder = batch_folder(
            [data[:size]] * 2, f"batches{size}", physical_batch_size=PHYSICAL,
            expected_batch_size=size, truncated_batch_size=size,
            num_examples=2 * 65_536, steps_per_file=1,
        )  # fmt: skip
        request = Request(
            settings=TrainSettings(noise_multiplier=1.0, l2_norm_clip=1.0),
            batches=folder.path,
            held_out=held_out,
            run=tmp_path / f"run{size}",
        )
        done = subprocess.run(
            child_of(request, _PEAK), capture_output=True, check=True, text=True
        )
        peaks.append(int(done.stdout) / 1024)
    assert max(peaks) < 4096, peaks
    # MiB.  A file of batches holds a step of 11 MiB, and three files are in memory.
    # One physical batch of 65,536 rows takes several hundred more.
    assert peaks[1] < peaks[0] + 100, peaks
