"""``dpsgd demo``: the whole path on synthetic data, by the commands a user would type.

Every stage is printed and run as its own process, so the demo shows what the command
line does.  The table at the end is made from the files that the stages wrote.
"""

from __future__ import annotations

import ctypes
import functools
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from accounting.cli.options import (
    AllowLargeDelta,
    LocalText,
    check_delta,
    delta_options,
)
from accounting.core.settings import OfPrivacy
from accounting.core.validation import InputError, check_float, check_int

if TYPE_CHECKING:
    from trainer.report.report import Report

_MODEL = ("--embedding-dim=4", "--hidden=32,16")
#: Of prctl(2): the signal that this process gets when the one that started it ends.
_PR_SET_PDEATHSIG = 1
#: With fewer rows, the noise dominates and the model learns nothing.
_LEAST_ROWS = 50_000


def run_stage(
    number: int,
    total: int,
    title: str,
    arguments: Sequence[str],
    *,
    aside: bool = False,
    remedy: str = "",
) -> None:
    """Runs a stage, which ends with this process, even one that is killed.

    Args:
      number: Its number, from 1.
      total: Number of stages.
      title: What it does.
      arguments: Arguments of ``dpsgd``.
      aside: Whether standard output is for something else.
      remedy: What to do, beside what the command says, if it fails.

    Raises:
      InputError: the command failed; its message was printed.
    """
    place = sys.stderr if aside else sys.stdout
    print(f"\n[{number}/{total}] {title}", file=place)
    print(f"$ dpsgd {shlex.join(arguments)}", file=place, flush=True)
    command = [sys.executable, "-m", "dpsgd", *arguments]
    stdout = sys.stderr if aside else None
    end_with_this = functools.partial(
        ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM
    )
    status = subprocess.run(
        command, check=False, stdout=stdout, preexec_fn=end_with_this
    ).returncode
    if status:
        raise InputError(
            f"Expected stage {number}, dpsgd {arguments[0]}, to succeed; its exit "
            f"status is {status}. Its own message is above. {remedy}".rstrip()
        )


def stages(
    out: pathlib.Path, rows: int, epsilon: float, delta: float, allow_large: bool
) -> list[tuple[str, list[str]]]:
    """Returns (description, arguments of ``dpsgd``) of every stage, in order.

    Args:
      out: Folder of the demo.
      rows: Number of synthetic rows.
      epsilon: Target epsilon of training.
      delta: Delta of training.
      allow_large: Whether a large delta is allowed.
    """
    num_train = rows * 8 // 10
    batch_size = max(64, num_train // 195)
    target = [f"--epsilon={epsilon:g}", *delta_options(delta, allow_large)]
    sampling = [f"--batch-size={batch_size}", "--epochs=3"]
    train = [f"--batches={out}/batches", f"--eval={out}/data/test", *_MODEL]
    plan = [f"--num-examples={num_train}", *sampling, *target]
    return [
        ("write raw click logs", ["synth", f"--rows={rows}", f"--out={out}/text"]),
        ("turn them into numbers", [
            "prepare", f"--input={out}/text", "--schema=criteo", f"--out={out}/data",
        ]),
        ("compute the noise that each sampler needs", ["plan", *plan, "--bands=auto"]),
        ("sample the batches", [
            "batches", f"--input={out}/data/train", f"--out={out}/batches",
            *sampling, *target, "--bands=auto",
        ]),
        ("verify their checksums", ["verify", f"{out}/batches"]),
        ("train without privacy, for comparison", [
            "train", *train, f"--out={out}/non-private", "--method=non-private",
        ]),
        ("train with differential privacy", [
            "train", *train, f"--out={out}/dp-sgd", *target,
            "--ema-decay=0.99", "--keep-last=10",
        ]),
        ("state the epsilon of what was executed", [
            "account", f"{out}/dp-sgd", *delta_options(None, allow_large),
        ]),
        ("write a report page to share", [
            "report", f"{out}/dp-sgd", f"--out={out}/report.html",
        ]),
    ]  # fmt: skip


def result(out: pathlib.Path) -> Report:
    """Returns both models, and guessing, side by side, with the privacy statement.

    Args:
      out: Folder of the demo, with all stages done.
    """
    from trainer.report.report import Report, ReportTable  # after --help
    from trainer.report.run_files import PLAIN

    private, plain = (
        json.loads((out / name / "metrics.json").read_bytes())
        for name in ("dp-sgd", "non-private")
    )
    models = {
        "DP-SGD, with banded noise where it gains": private,
        "the same network and batches without privacy": plain,
        "guessing": private["guessing"],
    }
    statement = (out / "dp-sgd" / "privacy.txt").read_text()
    table = ReportTable(
        headings=("model", "test AUC", "test log loss"),
        rows=[
            (name, f"{each['auc']:.4f}", f"{each['log_loss']:.4f}")
            for name, each in models.items()
        ],
    )
    return Report(
        title="Demo: a private click model, and its epsilon",
        tables=[table],
        fields=models,
        notes=[PLAIN, statement.splitlines()[0]],
    )


def demo(
    *,
    out: LocalText = "demo",
    rows: int = 250_000,
    epsilon: Annotated[float, OfPrivacy] = 3.0,
    delta: Annotated[float | None, OfPrivacy] = None,
    allow_large_delta: AllowLargeDelta = False,
) -> None:
    """Runs the whole path on synthetic data: text, batches, models, epsilon, report.

    Takes a few minutes.  Each stage prints its command, which you can also run
    yourself.  The demo itself needs a new folder each time.

    For example:
      dpsgd demo
      dpsgd demo --out demo-of-a-million --rows 1000000

    Args:
      out: New or empty folder.
      rows: Number of synthetic rows.
      epsilon: Target epsilon of training.
      delta: Delta of training.  [default: 0.1 / training rows]
    """
    check_delta(delta, allow_large_delta)
    check_int("rows", rows, at_least=_LEAST_ROWS)
    check_float("epsilon", epsilon, above=0)
    if delta is None:
        delta = 0.1 / (rows * 8 // 10)
    root = pathlib.Path(out)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise InputError(
            f"Expected --out {out} to be a new or empty folder. Remove it, or choose "
            "another."
        )
    root.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    todo = stages(root, rows, epsilon, delta, allow_large_delta)
    for number, (title, arguments) in enumerate(todo, start=1):
        run_stage(number, len(todo), title, arguments)
    print()
    result(root).show()
    seconds = time.monotonic() - start
    print(f"report: {root}/report.html, to open in a browser  ({seconds:.0f} s)")
