"""No file, output or error of a run shows an example or a count of them.

Errors that a model raises on an example are the subject of ``test_withheld``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.validation import InputError
from trainer.report.progress import Terminal
from trainer.train import train


def test_no_value_and_no_count_of_real_rows_appears_in_public(
    request_for: Any,
    batch_folder: Callable[..., Any],
    rows: Any,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    canary, count = 12345432, 1237
    steps = [rows(count), rows(3)]
    steps[0]["integers"][5] = canary
    folder = batch_folder(
        steps, "canary", truncated_batch_size=2048, physical_batch_size=2048,
        expected_batch_size=1024, num_examples=4096,
    )  # fmt: skip
    messages = []
    request = request_for(batches=folder.path)
    with Terminal() as reporter:
        train(request, reporter)
    # The same data on paths that fail.
    spoiled = (folder.path / folder.manifest.files[0].name).read_bytes()
    (folder.path / folder.manifest.files[0].name).write_bytes(spoiled[:-9] + b"x" * 9)
    with pytest.raises(InputError) as caught:
        train(request_for("spoiled", batches=folder.path))
    messages.append(str(caught.value))
    captured = capfd.readouterr()
    texts = [captured.out, captured.err, caplog.text, *messages]
    for run in (request.run, request.run.parent / "spoiled"):
        public = (p for p in run.rglob("*") if "private" not in p.parts and p.is_file())
        texts += [path.read_bytes().decode("latin-1") for path in public]
    pattern = re.compile(rf"(?<![\d.])({canary}|{count}|{count + 3}|{count / 4096})")
    assert not [text for text in texts if pattern.search(text)]
