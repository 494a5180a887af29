"""Independent tasks on an engine of Apache Beam.

Formal guarantees:
  - When ``run_on_engine`` returns, every task ran to its end at least once.
  - What a task refuses is raised here as the same ``InputError``, in one line.

An engine may run a task again, or twice at once: a task must leave what is done alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.validation import InputError


def run_on_engine(
    options: PipelineOptions, task: Callable[[Any], None], items: Sequence[Any]
) -> None:
    """Calls ``task`` with every item, on the workers of an engine.

    Args:
      options: Of Beam: the runner, and what it needs.
      task: Can be pickled.
      items: Can be pickled; those of one call are spread over the workers.

    Raises:
      InputError: what a worker refused.
    """
    try:
        with beam.Pipeline(options=options) as pipeline:
            _ = (
                pipeline
                | beam.Create(list(items))
                | beam.Reshuffle()
                | beam.Map(task).with_output_types(type(None))
            )
    except Exception as error:
        raise _told_by(error) from None


def _told_by(error: Exception) -> Exception:
    """Returns the InputError of a worker, however Beam hands it over, or the error."""
    text = f"{type(error).__name__}: {error}"
    found = re.findall(r"InputError: (.*?)(?: \[while running .*)?$", text, re.M)
    return InputError(found[-1]) if found else error
