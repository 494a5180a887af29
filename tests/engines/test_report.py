"""The table says what was measured, and a difference or waste ends in an error."""

from __future__ import annotations

import pytest

from accounting.core.validation import InputError
from tests.engines.harness.__main__ import _refuse_differences, _refuse_waste
from tests.engines.harness.cluster import Share
from tests.engines.harness.faults import Record
from tests.engines.harness.jobs import Outcome
from tests.engines.harness.report import Row, Speed, show_rows, show_speed


def row(identical: bool, survived: bool, peak_bytes: int = 1 << 20) -> Row:
    record = Record(
        engine="flink",
        part="pool of worker1",
        pid=7,
        phase="writing",
        time="12:00:00",
        files=1,
        total_files=17,
        outcome=Outcome(seconds=5.0, identical=survived),
    )
    return Row(
        engine="flink",
        mode="cluster, 2 workers",
        rows_per_second=1234.5,
        identical=[True, identical],
        faults=[record],
        shares={"worker0": Share(read=0.25, written=0.5)},
        peak_bytes=peak_bytes,
        allowed_bytes=2 << 20,
    )


def test_the_table_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([row(identical=True, survived=True)])
    text = capsys.readouterr().out
    for said in ("1,23", "yes, 2", "1 of 1", "25%", "50%", "1 of 17", "12:00:00"):
        assert said in text
    assert "NO" not in text
    show_rows([row(identical=False, survived=False)])
    text = capsys.readouterr().out
    assert text.count("NO") == 2
    assert "0 of 1" in text


def test_a_second_worker_is_a_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"worker0": Share(read=0.25, written=0.5),
              "worker1": Share(read=0.75, written=0.5)}  # fmt: skip
    speed = Speed(engine="spark", rows=10**6, one=90.0, two=50.0, shares=shares,
                  peak_bytes=1, allowed_bytes=2)  # fmt: skip
    show_speed([speed])
    text = capsys.readouterr().out
    for said in ("1.80 x", "25% + 75%", "50% + 50%"):
        assert said in text


@pytest.mark.parametrize("fault", ["identical", "survived"])
def test_a_difference_is_an_error(fault: str) -> None:
    _refuse_differences([row(identical=True, survived=True)])
    with pytest.raises(InputError, match="the bytes of the local runner"):
        _refuse_differences(
            [row(**{"identical": True, "survived": True, fault: False})]
        )


def test_a_worker_above_its_memory_is_an_error() -> None:
    _refuse_waste([row(True, True, peak_bytes=2 << 20)])
    with pytest.raises(InputError, match="within 2 MiB"):
        _refuse_waste([row(True, True, peak_bytes=(2 << 20) + 1)])
