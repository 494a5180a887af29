"""The curve of held-out metrics as a CSV file and for TensorBoard.

Formal guarantees:
  - Only public numbers are written: steps, and metrics of held-out examples.
  - Both hold the whole curve of a run, also of a resumed one, and no point twice.

TensorBoard's event files are records of protocol buffers that TensorFlow defines; the
package ``tensorboard`` is only needed to view them.
"""

from __future__ import annotations

import csv
import io
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from pipelines.files.storage import write_atomically
from trainer.model.metrics import metric_names
from trainer.tf_compat import tf

#: One file per run, however often it is resumed.  TensorBoard reads names like this.
_EVENTS_NAME = "events.out.tfevents.0000000000.held-out"


def write_csv(points: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Writes a CSV line per point: ``step`` and all metrics, empty if not defined.

    Args:
      points: Dicts with ``step`` and metrics; at least one.
      path: Path of the file, which is replaced if it exists.
    """
    names = ["step", *metric_names(points[-1])]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())


def write_events(points: Sequence[dict[str, Any]], folder: pathlib.Path) -> None:
    """Writes the event file of all points, replacing an older one.

    Args:
      points: Dicts with ``step`` and metrics.
      folder: Log directory of TensorBoard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_EVENTS_NAME}"
    event = tf.compat.v1.Event
    now = time.time()
    with tf.io.TFRecordWriter(str(temporary)) as writer:
        version = event(wall_time=now, file_version="brain.Event:2")
        writer.write(version.SerializeToString())
        for point in points:
            summary = tf.compat.v1.Summary()
            for name in metric_names(point):
                if point[name] is not None:
                    summary.value.add(tag=f"held_out/{name}", simple_value=point[name])
            line = event(wall_time=now, step=point["step"], summary=summary)
            writer.write(line.SerializeToString())
    temporary.replace(folder / _EVENTS_NAME)
