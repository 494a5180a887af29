"""The scripts of the papers: their formulas by hand, and each as it is typed."""

from __future__ import annotations

import importlib
import math
import os
import pathlib
import subprocess
from typing import Any

import numpy as np
import pytest

from tests.command_line import invoke
from tests.warm_processes import warm_python

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "papers"
TRAINED = "--delta 1e-3 --noise-multiplier 1 --hidden 4 --embedding-dim 2"
#: Script -> its options, and what it prints of every run.
TYPED = {
    "variance": (
        "--eval {test} --seeds 2 --batch-size 32 --num-steps 8 --keep-last 3 "
        "--keep-every 2 -- --l2-norm-clip 1",
        ["standard deviation over runs", "variance of iterates", "within a factor 2"],
    ),
    "shift": (
        "--eval {test} --batch-size 16 --period 8 --shift-by label --metric log_loss "
        "-- --l2-norm-clip 1",
        ["last: ", "ema: ", "uta: "],
    ),
    "simulate": (
        "--eval {test} --batch-size 128 --small-batch-sizes 8,16,32 --seeds 1 "
        "--num-steps 6 --noise-multiplier 2 -- --l2-norm-clip 1",
        ["learning rate 0.01: "],
    ),
    "bias": ("--batch-size 16 --every 8 --", ["dp-sgd ", "dp-sat ", "bam "]),
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``script(name)``: the module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def test_a_line_by_hand(script: Any) -> None:
    # x = 1, 2, 3 and y = 0, 3, 3: the line is -1 + 1.5 x, off by -1/2, 1 and -1/2.
    mean, margin = script("simulate").line_through([2, 4, 8], [0.0, 3.0, 3.0], 16, 0.9)
    assert mean == pytest.approx(5.0)
    # Student's t with one degree of freedom: tan(0.45 pi).  1 + 1/3 + (4 - 2)^2 / 2.
    spread = math.tan(0.45 * math.pi) * math.sqrt(1.5)
    assert margin == pytest.approx(spread * math.sqrt(1 + 1 / 3 + 2))


def test_large_values_come_in_waves_and_every_row_once(script: Any) -> None:
    shift = script("shift")
    assert shift.shares(4, 4).round(3).tolist() == [0.146, 0.854, 0.854, 0.146]
    values = np.array([0.0, 1.0] * 40)
    rows = shift.order(values, batch_size=20, period=4)
    assert sorted(rows) == list(range(80))
    # 2.93, 20, 37.07 and 40 after each step, rounded down.
    assert values[rows].reshape(4, 20).sum(1).tolist() == [2, 18, 17, 3]


def test_equal_spreads_are_within_the_factor(script: Any) -> None:
    last = np.array([[0.0, 1.0], [2.0, 5.0]])
    spreads = np.tile(last.std(0, ddof=1), (2, 1))
    _, ratio, within = script("variance").summary(last, spreads, num_iterates=4)
    assert "1.00 (1.00 to 1.00)" in ratio
    assert "100% of the examples" in within


@pytest.mark.thorough
@pytest.mark.parametrize("name", TYPED)
def test_a_script_runs_as_it_is_typed(tmp_path: pathlib.Path, name: str) -> None:
    text, data, out = (tmp_path / part for part in ("text", "data", "out"))
    invoke(["synth", "--rows=400", f"--out={text}"], catch=False)
    prepared = f"--input={text}", "--schema=criteo", f"--out={data}"
    invoke(["prepare", *prepared], catch=False)
    options, printed = TYPED[name]
    own = options.format(test=data / "test").split()
    trained = TRAINED.split()
    if name == "simulate":  # the noise is that of the large run
        trained = [*trained[:2], *trained[4:]]
    script = f"import runpy; runpy.run_path('{name}.py', run_name='__main__')"
    done = subprocess.run(
        [warm_python(), "-c", script, f"--input={data}/train", f"--out={out}", *own,
         *trained],
        cwd=SCRIPTS, env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert all(any(line.startswith(one) for line in lines) for one in printed)
    pictures = list(out.glob("*.png"))
    assert len(pictures) == (name != "variance")
