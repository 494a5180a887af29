"""The README's code blocks run, in order, in one folder, as a newcomer types them.

Blocks after a comment "not run: reason" are skipped for that reason.  `train.txt` is
the real sample where there is one and synthetic text otherwise; sizes that are meant
for 46 million rows are replaced by ones for two thousand (see SMALLER).
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
BLOCK = re.compile(
    r"^(<!-- not run: [^\n]+ -->\n)?```(sh|python)\n(.*?)^```$", re.M | re.S
)
SMALLER = {
    "--batch-size 65536": "--batch-size 128",
    "--buckets 100000": "--buckets 500",
}


def blocks() -> list[tuple[bool, str, str]]:
    """(is it run, language, text) of every code block that has a language."""
    found = BLOCK.findall((ROOT / "README.md").read_text())
    return [(not skipped, language, text) for skipped, language, text in found]


def test_every_fenced_block_is_accounted_for() -> None:
    fences = (ROOT / "README.md").read_text().count("```")
    assert fences == 2 * len(blocks())
    assert sum(run for run, _, _ in blocks()) >= 3


@pytest.mark.slow
def test_readme_blocks_run(tmp_path: pathlib.Path) -> None:
    sample = ROOT.parent / "shared" / "data" / "criteo_sample.txt"
    sample = pathlib.Path(os.environ.get("DPSGD_CRITEO_SAMPLE", sample))
    bin_folder = pathlib.Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "dpsgd"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dpsgd "$@"\n')
    command.chmod(0o755)
    printed = ""
    for run, language, text in blocks():
        if "train.txt" in text and not (tmp_path / "train.txt").exists():
            source = sample if sample.is_file() else tmp_path / "text/part-00000.txt"
            shutil.copy(source, tmp_path / "train.txt")
        for large, small in SMALLER.items():
            text = text.replace(large, small)
        if not run:
            continue
        shell = ["bash", "-euo", "pipefail", "-c", text]
        result = subprocess.run(
            shell if language == "sh" else [sys.executable, "-c", text],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        printed += result.stdout
    assert "(2.99" in (tmp_path / "run" / "privacy.txt").read_text()
    verdicts = re.findall(r"^verdict: (\w+)", printed, re.M)
    assert verdicts == ["consistent", "VIOLATED", "consistent"]
    for name in ("run", "averaged-run", "criteo-run"):
        assert (tmp_path / name / "model.keras").exists()


def test_no_placeholder_is_left() -> None:
    for name in ("README.md", "CHANGELOG.md"):
        assert not re.search(r"@@|TODO|XXX", (ROOT / name).read_text())
