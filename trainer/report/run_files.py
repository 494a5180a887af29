"""The public files of a run beside its record, and what a reader should know of them.

``metrics.json`` and ``curve.json`` are returned as a run writes them, or refused.
Numbers of other than held-out examples are refused: they are not private.

``RUN/serving.json`` has the signature of the exported model, its input columns and its
outputs; one file serves all exported weights of a run:

    {"inputs": [{"name": "integers", "dtype": "float32", "shape": [13]}, ...],
     "outputs": ["probability"], "task": "binary",
     "digests": {"saved_model": ...}}

``RUN/saved_model`` has the same in ``signatures["serving_default"]``: inputs are
tensors (batch, *shape) by name, and so are outputs.  A SavedModel of which a file was
damaged, edited, or taken from another export does not have its digest.  Digests find
accidents: whoever can write a model can write them.

Public: everything here, if the held-out examples need no protection.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from accounting.core.validation import InputError, header, read_fields
from pipelines.batches.folder import CERTIFICATE_NAME, MANIFEST_NAME, PRIVATE_NAME
from pipelines.core.batches.manifest import Column, Manifest
from pipelines.core.files.local_files import digest_of
from pipelines.files.storage import pretty_json, read_json, write_atomically
from trainer.core.run.run_record import RECORD_NAME, RunRecord, read_run
from trainer.model.metrics import LOWER_IS_BETTER, in_words
from trainer.settings.train_settings import WEIGHT_AVERAGES

CURVE_NAME = "curve.json"
CURVE_PLOT_NAME = "curve.png"
METRICS_NAME = "metrics.json"
PRIVACY_NAME = "privacy.json"
PRIVACY_TEXT_NAME = "privacy.txt"
KERAS_MODEL_NAME = "model.keras"
SAVED_MODEL_NAME = "saved_model"
SERVING_NAME = "serving.json"
ITERATES_NAME = "iterates"


def exported_names(average: str | None = None) -> tuple[str, str]:
    """Returns the names of the exported forms of the last iterate, or of an average.

    Example:
      >>> exported_names("ema")
      ('ema_model.keras', 'ema_saved_model')
    """
    prefix = f"{average}_" if average else ""
    return prefix + KERAS_MODEL_NAME, prefix + SAVED_MODEL_NAME


#: All files that a run may write into its folder.
RUN_NAMES = (
    RECORD_NAME, MANIFEST_NAME, PRIVATE_NAME, CURVE_NAME, CURVE_PLOT_NAME,
    METRICS_NAME, PRIVACY_NAME, PRIVACY_TEXT_NAME, ITERATES_NAME, SERVING_NAME,
    CERTIFICATE_NAME, *exported_names(),
    *itertools.chain.from_iterable(map(exported_names, WEIGHT_AVERAGES)),
)  # fmt: skip


def read_finished(run: pathlib.Path) -> tuple[RunRecord, Manifest]:
    """Returns record and manifest of a finished run, or of one that stopped early.

    Raises:
      InputError: there is no record, or the run is incomplete.
    """
    record, manifest = read_run(run)
    if not (record.complete or (record.fits and record.fits[-1]["ended"])):
        raise InputError(
            f"Expected {run} to hold a finished run; it stopped after step "
            f"{record.num_steps_executed}. Give its command again to end it."
        )
    return record, manifest


_HELD_OUT = "held-out"
_WORDS = ("examples", "method")
_RESTORE = "Restore it, or train again."


def read_metrics(path: pathlib.Path) -> dict[str, Any]:
    """Returns the metrics of a finished run.

    Args:
      path: The ``metrics.json`` of a run.

    Raises:
      InputError: the file is missing, damaged, edited, or not of held-out examples.
    """
    found = _read(path)
    of_averages = found.get("aggregates")
    each = of_averages.values() if isinstance(of_averages, dict) else ()
    points = [found, of_averages, *each]
    if "num_examples" not in found or not all(map(_has_numbers, points)):
        raise _edited(path)
    return found


def read_curve(path: pathlib.Path, names: Collection[str]) -> list[dict[str, Any]]:
    """Returns the points of the curve of a run: steps, and the named metrics.

    Args:
      path: The ``curve.json`` of a run.
      names: Metrics that each point has.

    Raises:
      InputError: as for ``read_metrics``.
    """
    points, wanted = _read(path).get("points"), ("step", *names)
    if not isinstance(points, list) or not all(
        _has_numbers(point) and {*wanted} <= set(point) for point in points
    ):
        raise _edited(path)
    return [{name: point[name] for name in wanted} for point in points]


def _read(path: pathlib.Path) -> dict[str, Any]:
    found = read_json(path, remedy=_RESTORE)
    if not isinstance(found, dict):
        raise _edited(path)
    if found.get("examples") != _HELD_OUT:
        raise InputError(
            f"Expected {path} to say that its examples are {_HELD_OUT}: numbers of "
            "training examples are not private. Restore it, or remove it."
        )
    return found


def _edited(path: pathlib.Path) -> InputError:
    return InputError(
        f"Expected {path} to be as the run wrote it; it was edited. {_RESTORE}"
    )


def _has_numbers(found: Any) -> bool:
    """Whether the values of a point are numbers, not defined, or further fields."""
    return isinstance(found, dict) and all(
        value is None or type(value) in (int, float, list, dict)  # no truth value
        for name, value in found.items()
        if name not in _WORDS
    )


#: What a model without privacy is, which others are compared with.
PLAIN = (
    "Without privacy a model leaves out a tenth of the training rows, and is the "
    "iterate that is best on those."
)
#: A calibration error above which a model's probabilities mislead.
_FAR_OFF = 0.05


def warnings(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each way in which a model is not fit for use.

    Args:
      metrics: The metrics of a run, with those of ``guessing`` under that name.
    """
    constant = metrics.get("guessing") or {}
    for name, value in constant.items():
        found = metrics.get(name)
        if found is None or name == "accuracy":
            continue
        lower = name in LOWER_IS_BETTER
        if (found >= value) if lower else (found <= value):
            yield (
                f"The model is no better than guessing: {in_words(name)} {found:.4f}, "
                f"guessing {value:.4f}. Try more epochs, a larger batch or a smaller "
                "learning rate; another run adds its epsilon."
            )
            return
    error, count = metrics.get("calibration_error"), metrics.get("num_examples")
    if error is not None and count and error > _FAR_OFF + 1 / math.sqrt(count):
        yield (
            f"Its probabilities are off by {error:.2f} on average: use its order, not "
            "its probabilities. Try a smaller --learning-rate, or --average ema."
        )


_HEADER: Any = {"format_name": "dpsgd-serving", "version": 2}

#: Names of outputs.
PROBABILITY = "probability"
PROBABILITIES = "probabilities"
PREDICTION = "prediction"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """The signature of an exported model.

    Attributes:
      inputs: Input columns.
      outputs: Names of the outputs.
      task: Task of the loss: "binary", "classes" or "other".
      digests: Folder of each exported SavedModel -> digest of its files.
    """

    inputs: tuple[Column, ...]
    outputs: tuple[str, ...]
    task: str
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, with ``format`` and ``version``."""
        return {**header(**_HEADER), **dataclasses.asdict(self)}


def write_serving(run: pathlib.Path, serving: Serving) -> None:
    """Writes the signature of a run's exported model.

    Args:
      run: Folder of the run.
      serving: The signature.
    """
    write_atomically(run / SERVING_NAME, pretty_json(serving.to_json()))


def digest_of_folder(folder: pathlib.Path) -> str:
    """Returns a digest of the names and contents of all files of a SavedModel.

    TensorFlow's own hashes, which have a random name beside them, are left out.
    """
    found = (path for path in folder.rglob("*") if path.name != "fingerprint.pb")
    files = sorted(path for path in found if path.is_file())
    lines = (f"{digest_of(path)} {path.relative_to(folder)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_serving(run: pathlib.Path) -> Serving:
    """Returns the signature of the exported models of a run.

    Raises:
      InputError: there is no signature, or it is not of this format and version.
    """
    remedy = "Name a folder that `dpsgd train` finished, or call export() of its model."
    found = read_json(run / SERVING_NAME, remedy=remedy)
    names = [field.name for field in dataclasses.fields(Serving)]
    fields = read_fields(found, names, kind="serving signature", **_HEADER)
    try:
        return Serving(
            inputs=tuple(Column(**column) for column in fields["inputs"]),
            outputs=tuple(fields["outputs"]),
            task=str(fields["task"]),
            digests=dict(fields["digests"]),
        )
    except (TypeError, ValueError):
        raise InputError(
            f"Expected {run / SERVING_NAME} to be as it was written; it was edited. "
            "Restore it."
        ) from None
