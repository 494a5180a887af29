"""No file, output or error of a run shows an example or a count of them."""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.validation import InputError
from tests.trainer.run.whole_runs import private_settings
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


def test_errors_of_the_model_do_not_quote_examples(
    request_for: Any,
    rows: Any,
    batch_folder: Callable[..., Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "short_table.py").write_text(
        "import keras\n"
        "def make(manifest):\n"
        "    ids = keras.Input((26,), dtype='int32', name='categories')\n"
        "    values = keras.layers.Flatten()(keras.layers.Embedding(7, 1)(ids))\n"
        "    return keras.Model(ids, keras.layers.Dense(1)(values))\n"
    )
    monkeypatch.chdir(tmp_path)
    steps = [rows(4), rows(5)]
    steps[1]["categories"][2, 3] = 86420
    folder = batch_folder(steps, "out_of_range")
    request = request_for(
        batches=folder.path, settings=private_settings(model="short_table:make")
    )
    with pytest.raises(InputError, match="InvalidArgumentError") as caught:
        train(request)
    captured = capfd.readouterr()
    text = "".join(map(str, (caught.value, captured.out, captured.err)))
    assert "86420" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
