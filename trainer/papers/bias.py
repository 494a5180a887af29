"""NOT PRIVATE: the bias of clipping for each method, as in the figures of BAM.

    OUT/settings.json                     the settings
    OUT/runs/METHOD/                      a run of `dpsgd train` on the same batches
    OUT/non_private_bias.json, .md, .png  the table and the figure

`trainer.gradients.clipping_bias` defines what is measured.

Formal guarantees:
  - Nothing is measured unless the user declares the data public.
  - No file of a run outside its private folder holds what is measured.
  - A stopped measurement resumes with the same settings.  An existing run is used only
    if it was made with these settings and the current code of the user.

Public: the settings.  Not private: the report.

References:
  Knolle et al. (2023), arXiv:2308.12018, Theorem 1 and section 7.
"""

from __future__ import annotations

import csv
import dataclasses
import json

from accounting.core.validation import InputError
from pipelines.batches.folder import PRIVATE_NAME, read_manifest
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.storage import write_atomically
from trainer.experiments.comparison.runs import Say, check_code, silent
from trainer.papers.bias_report import NOT_PRIVATE, report
from trainer.papers.settings import BiasSettings
from trainer.report.plots import setting_in_words
from trainer.report.report import Report
from trainer.run import preflight
from trainer.run.preflight import is_finished
from trainer.settings.bias_settings import CLIPPING_BIAS_NAME
from trainer.settings.request import Request

_SETTINGS_NAME = "settings.json"


def measure_bias(
    settings: BiasSettings, say: Say = silent, make_batches: str = ""
) -> Report:
    """Trains with every method that is not done yet, and reports the bias of each.

    Arguments and errors as for `compare`.
    """
    del make_batches  # all methods train on the batches of the settings
    requests = settings.requests()
    for request in requests:
        if not is_finished(request.run):
            preflight.check(request)
    _check_same(settings)
    say(NOT_PRIVATE)
    for number, request in enumerate(requests, start=1):
        say(f"[{number}/{len(requests)}] {request.settings.method}")
        _train(request)
    lines = {each.settings.method: _read(each) for each in requests}
    plan = read_manifest(settings.batches).plan
    trained = [each.settings for each in requests]
    return report(
        lines, setting_in_words(plan.expected_batch_size, plan.num_steps, trained)
    )


def _check_same(settings: BiasSettings) -> None:
    """Refuses a folder of other settings; writes the settings into a new one."""
    asked = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    path = settings.out / _SETTINGS_NAME
    if path.exists() and read_json(path) != asked:
        raise InputError(
            f"Expected {settings.out} to have the settings given now; its "
            f"{_SETTINGS_NAME} says otherwise. Give the same settings, or another "
            "--out."
        )
    if not path.exists():
        settings.out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, pretty_json(asked))


def _train(request: Request) -> None:
    if is_finished(request.run):
        check_code(request.run)
        return
    # Imported here: it loads TensorFlow.
    from trainer.train import train

    train(request)


def _read(request: Request) -> list[dict[str, float]]:
    path = request.run / PRIVATE_NAME / CLIPPING_BIAS_NAME
    with path.open(newline="") as file:
        return [
            {name: float(value) for name, value in line.items()}
            for line in csv.DictReader(file)
        ]
