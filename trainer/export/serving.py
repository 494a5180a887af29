"""The signature of an exported model: its input columns and its outputs.

    RUN/serving.json    public; one for all exported weights of a run

    {"inputs": [{"name": "integers", "dtype": "float32", "shape": [13]}, ...],
     "outputs": ["probability"], "task": "binary",
     "digests": {"saved_model": ...}}

``RUN/saved_model`` has the same as ``signatures["serving_default"]``: inputs are
tensors (batch, *shape) by name, and so are outputs.

Formal guarantees:
  - ``read`` returns what ``write`` was given, or refuses the file.
  - A SavedModel of which a file was damaged, edited, or taken from another export does
    not have its digest.  Digests find accidents: who can write a model can write them.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from accounting.core.validation import InputError
from accounting.core.versioned_json import header, read_fields
from pipelines.core.batches.columns import Column
from pipelines.core.files.local_files import digest_of
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.storage import write_atomically
from trainer.report.run_files import SERVING_NAME

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


def write(run: pathlib.Path, serving: Serving) -> None:
    """Writes the signature ``serving`` into the folder ``run``; see `read`."""
    write_atomically(run / SERVING_NAME, pretty_json(serving.to_json()))


def digest_of_folder(folder: pathlib.Path) -> str:
    """Returns a digest of the names and contents of all files of a SavedModel.

    But for TensorFlow's own hashes, which have a random name beside them.
    """
    found = (path for path in folder.rglob("*") if path.name != "fingerprint.pb")
    files = sorted(path for path in found if path.is_file())
    lines = (f"{digest_of(path)} {path.relative_to(folder)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read(run: pathlib.Path) -> Serving:
    """Returns the signature of the exported models of a run.

    Raises:
      InputError: there is none, or it is not of this format and version.
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
