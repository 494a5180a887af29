"""Guarantees of pipelines.inputs.known_input."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from scipy import stats

from accounting.core.validation import InputError
from pipelines.batches.reader import read_batches
from pipelines.files.key_sources import insecure_key
from pipelines.inputs.known_input import know_input
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from tests.pipelines.conftest import SmallJobs, write_table

KEY = insecure_key(0)
#: Chance that a correct sampler would fail for a fresh key.
ERROR_RATE = 1e-6


def test_a_file_is_accepted_only_with_the_footer_that_was_listed(
    dataset: Dataset,
) -> None:
    known = know_input(KEY, dataset)
    key = known.data_set_key(KEY)
    for block in dataset.blocks:
        footer = dataset.footers[block.name]
        assert known.is_listed(key, block, footer)
        assert not known.is_listed(key, block, footer[::-1])
        assert not known.is_listed(insecure_key(1), block, footer)


def test_what_travels_tells_nothing_about_the_input(dataset: Dataset) -> None:
    one, other = (know_input(insecure_key(seed), dataset) for seed in (0, 1))
    assert one.input_id != other.input_id
    tags = [found.tags[i : i + 16] for found in (one, other) for i in range(0, 96, 16)]
    assert len(set(tags)) == 2 * 6
    for hidden in (dataset.digest, *dataset.footers.values()):
        assert bytes.fromhex(hidden)[:16] not in tags
        assert one.input_id not in hidden


def test_another_key_is_refused(dataset: Dataset) -> None:
    with pytest.raises(InputError, match="the key of this job"):
        know_input(KEY, dataset).data_set_key(insecure_key(1))


def test_derivation_golden_value() -> None:
    """Recipe: the key of seed 0 and a data set without blocks.

    If it changes, no batches that were made before can be made again: raise
    FORMAT_VERSION and say so in the changelog.
    """
    nothing = Dataset(
        columns=(), blocks=(), description={}, files={}, hidden=(), footers={}
    )
    assert know_input(KEY, nothing).data_set_key(KEY).hex() == GOLDEN


GOLDEN = "44b1e3a34bb848793b2bbcea6282a0dc2f47217a5dceb4952d1aaca881509e99"


@pytest.mark.parametrize("sampler", ["truncated-poisson", "dynamic-shuffle"])
def test_one_key_chooses_independently_for_two_data_sets_of_the_same_names(
    tmp_path: pathlib.Path, jobs: SmallJobs, sampler: str
) -> None:
    cap = {"truncated_batch_size": 30} if sampler == "truncated-poisson" else {}
    layout = jobs.layout(None, sampler=sampler, **cap)
    chosen = []
    for name, first in (("one", 0), ("other", 1000)):
        (tmp_path / name).mkdir()
        write_table(tmp_path / name / "part-0.parquet", first, 100, 25)
        dataset = list_blocks(str(tmp_path / name))
        out = jobs.write(f"{name}-batches", layout, dataset=dataset)
        steps = np.zeros((100, 40), int)
        for batch in read_batches(out):
            steps[batch.columns["id"][batch.weight == 1] - first, batch.step] = 1
        chosen.append(steps)
    # Of the steps of one epoch, because a persistent shuffle repeats it.  Given the
    # choices of one data set, the other makes each again with probability 1 / 10; in a
    # shuffle rows repel each other, which makes the law narrower than the binomial.
    one, other = (steps[:, :10] for steps in chosen)
    again = stats.binomtest(int((one & other).sum()), int(one.sum()), 0.1)
    assert again.pvalue > ERROR_RATE
    same = stats.binomtest(int((one & one).sum()), int(one.sum()), 0.1)
    assert same.pvalue < ERROR_RATE  # the fault that this test is for
