"""Time and memory of bounding, batching, training and accounting of many users.

    python -m examples.benchmarks.users_at_size --rows 46000000 --users 5000000 \
        --work /tmp/users

The rows are made a million at a time: eight numbers, a label that depends on them and
on the user, and an id.  Users are unequal: number r of n has rows in proportion to
r^(-2/3), so that the first of five million has 270,000 of 46 million rows, and half of
the users have fewer than five.  Then ``dpsgd prepare``, ``batches``, ``train`` and
``account`` run as commands, each in a process of its own.

What is printed of a command is wall-clock seconds, seconds of processors, and the
resident memory of the largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import sys
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_ROWS_OF_FILE = 1 << 20
_ROWS_OF_GROUP = 1 << 17
_NUMBERS = 8
_DELTA = 1e-8
#: All rows are for training.
_SCHEMA = f"""
version = 1
split = {{ by = "hash", column = "user", shares = [1, 0, 0] }}
[columns]
user = {{ kind = "user" }}
x = {{ kind = "numeric", length = {_NUMBERS} }}
label = {{ kind = "label", task = "binary" }}
"""
#: Steps of an epoch.
_STEPS = 700
#: Where commands find this project, and the model below.
_PATHS = [str(pathlib.Path.cwd()), str(pathlib.Path(__file__).parent)]
_WITH_MODEL = {**os.environ, "PYTHONPATH": os.pathsep.join(_PATHS)}


def linear(manifest: Any) -> Any:
    """Returns a model of a row: eight numbers, one hidden layer, one output."""
    from trainer.core.tf_compat import keras

    del manifest
    numbers = keras.Input((_NUMBERS,), name="x")
    hidden = keras.layers.Dense(32, activation="relu")(numbers)
    return keras.Model(numbers, keras.layers.Dense(1)(hidden))


def rows_of(
    seed: int, count: int, num_users: int, *, with_users: bool = True
) -> pa.Table:
    """Returns rows: the same ones for the same seed.

    Args:
      seed: Which rows.
      count: How many.
      num_users: Users of the whole table.
      with_users: Whether there is a column of ids.
    """
    rng = np.random.default_rng((7, seed))
    user = (num_users * rng.random(count) ** 3).astype(np.int64)
    x = rng.normal(size=(count, _NUMBERS)).astype(np.float32)
    of_user = (user * 2654435761 % 1000) / 1000 - 0.5
    score = x[:, 0] - 0.5 * x[:, 1] + of_user
    label = (score + rng.logistic(size=count) > 0).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), _NUMBERS)
    columns: dict[str, Any] = {"x": lists, "label": label}
    return pa.table({"user": user, **columns} if with_users else columns)


def write_rows(work: pathlib.Path, num_rows: int, num_users: int) -> None:
    """Writes the table, unless it is there, and 20,000 rows to evaluate by.

    Args:
      work: Gets folders ``table`` and ``held-out``.
      num_rows: Of the table.
      num_users: Of the table, at most.
    """
    for name in ("table", "held-out"):
        (work / name).mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, num_rows, _ROWS_OF_FILE)):
        path = work / "table" / f"part-{number:05d}.parquet"
        if not path.exists():
            rows = rows_of(number, min(_ROWS_OF_FILE, num_rows - first), num_users)
            pq.write_table(
                rows, path.with_suffix(".new"), row_group_size=_ROWS_OF_GROUP
            )
            path.with_suffix(".new").rename(path)
    (work / "schema.toml").write_text(_SCHEMA)
    rows = rows_of(1 << 30, 20_000, num_users, with_users=False)
    pq.write_table(rows, work / "held-out" / "part.parquet")


def commands(options: argparse.Namespace) -> list[list[str]]:
    """Returns the commands, with their options."""
    work, slots = options.work, options.rows
    model = f"{pathlib.Path(__file__).stem}:{linear.__name__}"
    most = f"--max-examples-per-user {options.most}"
    size = max(1, slots // _STEPS)
    lines = [
        f"prepare --input {work}/table --schema {work}/schema.toml {most} "
        f"--num-examples {slots} --out {work}/bounded",
        f"batches --input {work}/bounded/train --out {work}/batches --epochs 1 "
        f"--batch-size {size}",
        f"train --batches {work}/batches --eval {work}/held-out --out {work}/run "
        f"--model {model} --epsilon 2 --delta {_DELTA} --l2-norm-clip 1 "
        "--optimizer sgd --learning-rate 0.5",
        f"account {work}/run",
    ]
    return [line.split() for line in lines]


def measure(command: list[str], log: pathlib.Path) -> dict[str, Any]:
    """Runs a command and returns its time and memory.

    Args:
      command: Of ``dpsgd``.
      log: Gets what it prints.

    Raises:
      RuntimeError: it failed.
    """
    program = [sys.executable, "-m", "dpsgd", *command]
    began = time.perf_counter()
    with log.open("wb") as file:
        redirect = [(os.POSIX_SPAWN_DUP2, file.fileno(), place) for place in (1, 2)]
        child = os.posix_spawn(program[0], program, _WITH_MODEL, file_actions=redirect)
        _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"dpsgd {command[0]} failed; see {log}")
    return {
        "command": command[0],
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": usage.ru_maxrss >> 10,
    }


def megabytes(folder: pathlib.Path) -> int:
    """Returns the size of the files of a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files) >> 20


def main() -> None:
    """Makes the rows, runs the commands, and prints what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=46_000_000)
    parser.add_argument("--users", type=int, default=5_000_000)
    parser.add_argument("--most", type=int, default=10, help="Rows of a user.")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    options = parser.parse_args()
    write_rows(options.work, options.rows, options.users)
    table = {"rows": options.rows, "mib": megabytes(options.work / "table")}
    print(json.dumps(table), flush=True)
    for name in ("bounded", "batches", "run"):
        shutil.rmtree(options.work / name, ignore_errors=True)
    for command in commands(options):
        found = measure(command, options.work / f"{command[0]}.log")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
