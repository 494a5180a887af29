"""SIGKILL at every change of the disk: nothing is lost, nothing sensitive stays.

Commands run in forks of a process that has imported what they need.  A fork kills
itself right before its n-th change: an open for writing, a rename, a removal, a folder
made or removed.  Then the same command is given again.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.files.key_files import create_key_file

_SCHEMA = """\
version = 1
[columns.person]
kind = "user"
[columns.row]
kind = "numeric"
range = [-1, 1]
[columns.y]
kind = "label"
task = "binary"
"""

#: ``python -c ... FOLDER EVERY CLEAN COMMAND...``; for each command it kills at every
#: n-th change and, of the last ones, which are those of the clean-up, at every m-th and
#: at the last four.  If m is 1, also at the last change of each kind: of an event, and
#: of a name without its numbers.
_KILLS = """
import os, pathlib, re, shutil, signal, sys
from accounting.core.plan import DpSgdPlan
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job import poisson_batching
from pipelines.job.runtime.tasks import Runtime
from pipelines.job.sizing import make_layout
from pipelines.tables import synthetic
from pipelines.tables.job import prepare_job
from pipelines.tables.schema.schema import Schema
from pipelines.tables.table_format import TableOptions
from pipelines.users import bound_folder, prepare_users
from pipelines.users.bound import bound
from pipelines.users.bound_job import BoundSettings

folder, every, clean = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:4])
bound_folder.RUN_ROWS = 40

def direct(task, items):
    for item in items:
        task(item)

here, engine = Runtime(num_threads=1), Runtime(run_tasks=direct)
settings = dict(user_column="person", max_examples_per_user=2, num_examples=90)
table = TableOptions(schema=Schema.read(folder / "schema.toml"), row_group_rows=16)
rows, key = str(folder / "rows.parquet"), folder / "key"

def users(out, runtime, **more):
    prepare_users.prepare_users(
        rows, out, table, BoundSettings(**settings, **more), key_file=key,
        runtime=runtime)

def batches(out):
    dataset = list_blocks(str(folder / "numbers.parquet"))
    plan = DpSgdPlan(sampler="dynamic-shuffle", num_examples=150,  # leaves most files
                     expected_batch_size=38, num_steps=4, num_epochs=1)
    poisson_batching.local_threads = lambda *_: 1
    poisson_batching.write_batches(
        dataset=dataset, layout=make_layout(plan, dataset, 16), out=out, key_file=key)

plain = TableOptions(schema=table.schema, row_group_rows=16, with_users=True)
COMMANDS = {
    "synth": lambda out: synthetic.write_synth(
        out, synthetic.SynthOptions(num_rows=20)),
    "prepare": lambda out: prepare_job.prepare(rows, out, plain, runtime=here),
    "prepare-engine": lambda out: prepare_job.prepare(
        rows, out, plain, runtime=engine),
    "bound": lambda out: bound(
        rows, out, BoundSettings(**settings), key_file=key, runtime=here),
    "users": lambda out: users(out, here),
    "users-engine": lambda out: users(out, engine, sampled="users"),
    "own-key": lambda out: bound(
        rows, out, BoundSettings(**settings), runtime=here),
    "batches": batches,
}
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")
left, kinds = None, []

def is_ours(path):
    "Whether a path is in the folder; rmtree gives names without one."
    if isinstance(path, int):
        return False
    name = os.fsdecode(path)
    return not name.startswith("/") or name.startswith(str(folder))

def audit(event, arguments):
    global left
    if left is None:
        return
    write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if not (event in CHANGES or write) or not is_ours(arguments[0]):
        return
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    name = re.sub("[0-9a-f]{8,}|[0-9]", "", os.path.basename(arguments[0]))
    kinds.append(event + name)

sys.addaudithook(audit)

def run(command, place, allowed):
    "Runs the command in a fork; returns its status, and the kinds of its changes."
    global left
    ends, told = os.pipe()
    if os.fork() == 0:
        code, left = 0, allowed
        try:
            COMMANDS[command](place / "out")
        except BaseException as error:
            print(place.name, repr(error), file=sys.stderr, flush=True)
            code = 1
        left = None
        os.write(told, os.fsencode("\\0".join(kinds)))
        os._exit(code)
    os.close(told)
    _, status = os.wait()
    with os.fdopen(ends) as pipe:
        return os.waitstatus_to_exitcode(status), pipe.read().split("\\0")

def files(place):
    return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else b""
            for path in sorted(place.rglob("*"))}

def check(command):
    whole = folder / command / "whole"
    whole.mkdir(parents=True)
    status, found = run(command, whole, MANY)
    assert status == 0, command
    changes, wanted = len(found), files(whole)
    last = {kind: number for number, kind in enumerate(found) if clean == 1}
    assert all(name.split("/")[0] == "out" for name in wanted), wanted.keys()
    deaths = sorted({*range(0, changes, every), *range(changes - 4, changes),
                     *last.values(),
                     *range(max(0, changes - 25), changes, clean)})
    finished = 0
    for number in deaths:
        place = folder / command / str(number)
        place.mkdir()
        status, _ = run(command, place, number)
        assert status == -signal.SIGKILL, (command, number, changes, status)
        resumes = any(place.glob("out*/**/job.json"))
        made = "out/manifest.json" if command == "batches" else "out/*"
        ended = any(place.glob(made)) and not resumes
        status, _ = run(command, place, MANY)
        assert status == (1 if ended else 0), (command, number, changes, status)
        finished += ended
        found = files(place)
        if command == "own-key":  # another key chooses other rows
            found, same = list(found), list(wanted)
        else:
            same = wanted
        assert found == same, (command, number, sorted(set(found) ^ set(same)))
        shutil.rmtree(place)
    assert len(deaths) > 5, command
    # The last changes remove the lock and the folder that is empty by then.
    assert finished <= 3, (command, finished)
    assert finished or command == "batches", command

MANY = 1 << 30
for command in sys.argv[4:]:
    check(command)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    number = np.arange(150)
    columns = {
        "person": [f"person {user}" for user in number % 37],
        "row": number / 150,
        "y": number % 2,
    }
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=30)
    numbers = table.drop_columns("person")
    pq.write_table(numbers, tmp_path / "numbers.parquet", row_group_size=30)
    (tmp_path / "schema.toml").write_text(_SCHEMA)
    create_key_file(tmp_path / "key")
    return tmp_path


COMMANDS = ("synth", "prepare", "bound", "users-engine", "own-key")
#: Made of the jobs of the others.
COMPOSED = ("prepare-engine", "users")


def kill_and_repeat(root: pathlib.Path, folder: pathlib.Path, *told: int | str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLS, str(folder), *map(str, told)],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_kill_in_the_clean_up_leaves_nothing_and_the_same_command_ends_it(
    root: pathlib.Path, folder: pathlib.Path
) -> None:
    kill_and_repeat(root, folder, 37, 4, *COMMANDS, *COMPOSED)


@pytest.mark.thorough
def test_a_kill_at_any_change_of_the_disk_is_mended_by_the_same_command(
    root: pathlib.Path, folder: pathlib.Path
) -> None:
    kill_and_repeat(root, folder, 7, 1, *COMMANDS, "batches")
