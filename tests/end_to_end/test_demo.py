"""The demo, on fewer rows than a person would give it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run(
    root: pathlib.Path, folder: pathlib.Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dpsgd", "demo", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_demo_ends_in_a_report(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    result = run(root, tmp_path, "--rows=60000", "--epsilon=4")
    assert result.returncode == 0, result.stderr
    report = (tmp_path / "demo" / "report.md").read_text()
    for name in re.findall(r"\]\((.*?)\)", report):
        assert (tmp_path / "demo" / name).read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"^\| (ema|past_ema|upa|opa|omv): ", report, re.M)) == 5
    assert re.search(r"\((3\.99\d*|4\.0*), ", report)
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "Privacy report: dp-sgd" in page
    assert page.count("<polyline") == 3
    assert f"report: {pathlib.Path('demo') / 'report.html'}" in result.stdout
    metrics = {
        name: json.loads((tmp_path / "demo" / name / "metrics.json").read_bytes())
        for name in ("dp-sgd", "non-private")
    }
    # The signal is there to be learned, and most of it survives the noise.
    assert metrics["non-private"]["auc"] > 0.75
    assert metrics["dp-sgd"]["auc"] > 0.65
    again = run(root, tmp_path, "--rows=60000")
    assert again.returncode == 2
    assert "new or empty folder" in again.stderr


def test_too_few_rows_are_refused(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    result = run(root, tmp_path, "--rows=1000")
    assert result.returncode == 2
    assert "rows=1000" in result.stderr
    assert not (tmp_path / "demo").exists()
