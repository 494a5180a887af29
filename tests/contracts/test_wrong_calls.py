"""Wrong calls of every command: exit code 2, one line, and a remedy that works.

Each row of the tables is what a user typed, what the answer must hold (the value and
the bound), and the remedy: flags that are added (the last value of a flag wins) or,
after a minus, taken away.  With the remedy the same command gets to its work.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpsgd
from dpsgd import command_line
from pipelines.batches.folder import read_manifest
from pipelines.core.batches.manifest import Manifest
from tests.trainer.conftest import BatchFolder, write_run_folder
from trainer.export import serving
from trainer.export.serving import Serving


@dataclasses.dataclass(frozen=True)
class Row:
    """One wrong call.

    Attributes:
      flags: What is added to the base of the command; all of it if ``whole``.
      says: Must be in the answer.
      remedy: What mends it; None where the answer names a file or flag to give.
      whole: Whether there is no base.
    """

    flags: str
    says: str
    remedy: str | None = None
    whole: bool = False


BASES = {
    "batches": "--input input --out new --batch-size 10 --epochs 1",
    "verify": "",
    "synth": "--rows 10 --out new",
    "schema": "table.csv --out new.toml",
    "prepare": "--input text --out new --buckets 10",
    "plan": "--num-examples 1000 --batch-size 10 --epochs 1 --epsilon 2 --delta 1e-6 "
    "--sampler deterministic",
    "demo": "--out new",
    "fit": "table.csv --label income --numeric age --epsilon 3 --delta 1e-5 --out new",
    "train": "--batches batches --eval data/test --out new --l2-norm-clip 1 "
    "--noise-multiplier 1",
    "bound": "--input input --user-column id --max-examples-per-user 2 "
    "--num-examples 100 --out new",
    "predict": "run --input data/test --out new",
    "account": "--sampler poisson --num-examples 1000 --batch-size 10 --epochs 1 "
    "--noise-multiplier 1 --delta 1e-5",
    "audit": "--sampler poisson --num-examples 1000 --batch-size 10 --epochs 1 "
    "--noise-multiplier 1 --delta 1e-5",
    "statistics": "--input numbers/val --schema numbers.toml --out new --epsilon 9 "
    "--delta 1e-6",
    "tune": "--input data/train --score data/val --out new --runs 2 --epsilon 90 "
    "--delta 1e-6 --batch-size 16 --epochs 1",
    "evaluate": "run --batches batches --input data/test --epsilon 9",
    "report": "run --out new.html",
    "budget": "new.budget --batches batches --runs 2 --epsilon 3 --delta 1e-6",
    "compare": "--input data/train --eval data/test --out new --epsilon 1 --delta 1e-5 "
    "--batch-size 16 --epochs 1 --l2-norm-clip 1",
    "variance": "--input data/train --eval data/test --out new --batch-size 16 "
    "--epochs 1 --noise-multiplier 1 --delta 1e-5 --l2-norm-clip 1 --keep-last 3",
    "shift": "--input data/train --eval data/test --out new --batch-size 8 --period 4 "
    "--shift-by label --data-is-public --noise-multiplier 1 --l2-norm-clip 1",
    "simulate": "--input data/train --eval data/test --out new --batch-size 32 "
    "--small-batch-sizes 4,8 --epochs 1 --noise-multiplier 1 --delta 1e-5 "
    "--l2-norm-clip 1",
    "bias": "--batches batches --eval data/test --out new --data-is-public "
    "--noise-multiplier 1 --l2-norm-clip 1 --bam-radius 0.1 --sat-radius 0.1",
}
ENOUGH = {"batches": "536900000"}  # bytes


def row(flags: str, says: str, remedy: str | None = None) -> Row:
    return Row(flags, says, remedy)


def whole(flags: str, says: str, remedy: str | None = None) -> Row:
    return Row(flags, says, remedy, whole=True)


def number(flag: str, value: str, says: str, remedy: str) -> Row:
    """A value of a flag, and another one in its place."""
    return row(f"{flag} {value}", says, f"- {flag} + {flag} {remedy}")


def not_a(kind: str, flag: str, values: str, remedy: str) -> list[Row]:
    """Words where ``kind``, integer or float, is expected."""
    return [
        number(
            flag, value, f"Invalid value for '{flag}': '{value}' is not a valid {kind}",
            remedy,
        )
        for value in values.split()
    ]  # fmt: skip


DELTAS = [
    number("--delta", "0", "delta=0.0 > 0", "1e-8"),
    number("--delta", "1e-400", "delta=0.0 > 0", "1e-8"),
    number("--delta", "-1e-5", "delta=-1e-05 > 0", "1e-8"),
    number("--delta", "1", "delta=1.0 < 1", "1e-8"),
    number("--delta", "nan", "delta=nan to be finite", "1e-8"),
    row("--delta 0.5", "delta=0.5 < 0.01", "--delta 1e-08"),
    row("--delta 0.01", "delta=0.01 < 0.01", "--allow-large-delta"),
    *not_a("float", "--delta", "x", "1e-8"),
]
UNKNOWN = [
    row("--nosuch", "'--nosuch'", "- --nosuch"),
    row("extra", "extra", "- extra"),
]
EPOCHS = [
    number("--epochs", "0", "epochs=0 >= 1", "1"),
    number("--epochs", "-1", "epochs=-1 >= 1", "1"),
    *not_a("integer", "--epochs", "x 1.5", "1"),
]
STEPS = [
    *EPOCHS,
    row("--num-steps 10", "exactly one of --epochs and --num-steps", "- --num-steps"),
]
SAMPLERS = [
    number("--sampler", "nosuch", "'nosuch' is not one of 'deterministic'", "poisson"),
    number("--sampler", "Poisson", "'Poisson' is not one of", "poisson"),
]


def batch_sizes(most: int) -> list[Row]:
    """Of a data set of ``most`` examples."""
    return [
        number("--batch-size", value, "=" + f"{value} {bound}", "10")
        for value, bound in [
            ("0", f">= 1. Give --batch-size from 1 to {most}"),
            ("-1", ">= 1"),
            (str(most + 1), f"<= {most}. Give --batch-size from 1 to {most}"),
            ("9" * 30, f"<= {most}"),
        ]
    ]


def epsilons(flag: str = "--epsilon", least: str = "> 0") -> list[Row]:
    return [
        number(flag, "-1", f"epsilon=-1.0 {least}", "1"),
        number(flag, "nan", "epsilon=nan to be finite", "1"),
        number(flag, "inf", "epsilon=inf to be finite", "1"),
        *not_a("float", flag, "x", "1"),
    ]


BATCHES = [
    whole("", "Missing option '--input'"),
    whole("--input input", "Missing option '--out'"),
    whole("--input input --out new", "Missing option '--batch-size'"),
    whole("--input input --out new --batchsize 10 --epochs 1",
          "No such option '--batchsize'. Did you mean --batch-size?"),
    row("--samplr=poisson", "Did you mean --sampler?"),
    whole("--input input --out new --batch-size 10", "--epochs and --num-steps",
          "--epochs 1"),
    whole("--input", "'--input' requires an argument"),
    *batch_sizes(100),
    *not_a("integer", "--batch-size", "x 10.5 1e3", "10"),
    *STEPS,
    whole("--input input --out new --batch-size 10 --num-steps 0", "num_steps=0 >= 1",
          "--num-steps 1"),
    whole("--input input --out new --batch-size 10 --num-steps -3", "num_steps=-3 >= 1",
          "--num-steps 1"),
    number("--epochs", "99999999999", "num_steps=999999999990 <= 1000000000", "1"),
    *epsilons(),
    number("--epsilon", "0", "epsilon=0.0 > 0", "1"),
    *DELTAS,
    *SAMPLERS,
    *(
        whole(f"--input input --out new --batch-size 10 --num-steps 7 --sampler {name}",
              f"steps_per_epoch=7 to be 10 for sampler='{name}'",
              "- --num-steps + --epochs 1")
        for name in ("deterministic", "persistent-shuffle", "dynamic-shuffle",
                     "balls-and-bins")
    ),
    *(
        row(f"--sampler {name} --truncated-batch-size 20", f"sampler is {name}",
            "- --truncated-batch-size")
        for name in ("poisson", "balls-and-bins", "dynamic-shuffle")
    ),
    *(
        number("--truncated-batch-size", value, f"truncated_batch_size={value} {bound}",
               remedy)
        for value, bound, remedy in [
            ("9", ">= 10. Give --truncated-batch-size from 10 to 100", "10"),
            ("0", ">= 10", "auto"), ("-1", ">= 10", "10"), ("101", "<= 100", "100"),
        ]
    ),
    *(
        number("--truncated-batch-size", value, "to be 'auto' or an integer", "auto")
        for value in ("x", "20.5", "''", "Auto")
    ),
    number("--physical-batch-size", "0", "physical_batch_size=0 >= 1", "1"),
    number("--physical-batch-size", "-1", "physical_batch_size=-1 >= 1", "1"),
    *not_a("integer", "--physical-batch-size", "x 1.5", "8"),
    number("--memory-limit", "1MiB", "memory_limit=1048576 >= 5368", "1GiB"),
    number("--memory-limit", "0", "memory_limit=0 >= 5368", "1GiB"),
    row("--sampler dynamic-shuffle --memory-limit 514MiB", "finding the order",
        "--memory-limit 1GiB"),
    *(
        number("--memory-limit", value, f"'{value}' is not a size such as 2GiB", "2GiB")
        for value in ("x", "-1GiB", "1XB", "2,5GiB", "GiB")
    ),
    number("--shuffle", "nosuch", "'nosuch' is not one of 'auto'", "auto"),
    row("--shuffle engine", "--shuffle engine with a --runner", "- --shuffle"),
    row("--scratch s3://bucket/x", "--scratch s3://bucket/x to be on this machine",
        "- --scratch"),
    number("--runner", "NoSuch", "runner='NoSuch'", "FnApiRunner"),
    row("--runner ''", "runner='' to be one that Beam has", "- --runner"),
    number("--direct_num_workers", "2", "direct_num_workers=2 to be 1", "1"),
    number("--direct_num_workers", "x", "invalid int value: 'x'", "1"),
    row("--nosuch", "--nosuch to be an option", "- --nosuch"),
    row("--nosuch=3", "--nosuch=3 to be an option", "- --nosuch=3"),
    row("-x", "-x to be an option", "- -x"),
    row("extra", "extra to be an option", "- extra"),
    row("--epoch 3", "--epoch to be an option", "- --epoch"),
]  # fmt: skip

VERIFY = [
    whole("", "Missing argument 'DIRECTORY'"),
    whole("nosuch", "nosuch/manifest.json to exist"),
    whole("input", "input/manifest.json to exist"),
    whole("batches extra", "unexpected extra argument (extra)", "- extra"),
    whole("batches --nosuch", "No such option '--nosuch'", "- --nosuch"),
]

SYNTH = [
    whole("", "Missing option '--rows'"),
    whole("--rows 10", "Missing option '--out'", "--out new"),
    number("--rows", "0", "--rows=0 >= 1", "1"),
    number("--rows", "-1", "--rows=-1 >= 1", "1"),
    *not_a("integer", "--rows", "x 1.5", "1"),
    number("--files", "0", "--files=0 >= 1", "1"),
    number("--files", "11", "--files=11 <= 10", "10"),
    *not_a("integer", "--files", "x", "1"),
    number("--seed", "-1", "--seed=-1 >= 0", "0"),
    *not_a("integer", "--seed", "x", "0"),
    number("--rows-per-user", "0.5", "--rows-per-user=0.5 >= 1", "2"),
    *not_a("float", "--rows-per-user", "x", "2.5"),
    *UNKNOWN,
]

SCHEMA = [
    whole("", "Missing argument 'TABLE'"),
    whole("nosuch.csv", "there are none"),
    whole("text", "ends in .csv, .tsv"),
    row("--label incom", "Did you mean income?", "--label income"),
    row("--numeric agee", "column agee in table.csv", "- --numeric"),
    number("--look-at-rows", "-1", "--look-at-rows=-1 >= 0", "3"),
    *not_a("integer", "--look-at-rows", "x", "3"),
    row("--out input", "--out input to be a new file", "--out another.toml"),
    row("--out nosuch/a.toml", "a new file in a folder that exists", "--out a.toml"),
    *UNKNOWN,
]  # fmt: skip

_WITH_SCHEMA = "--input table.csv --schema table.toml --out new"
_WITH_USERS = "--input table.csv --schema users.toml --out new"
PREPARE = [
    whole("--input table.csv --schema nosuch.toml --out new", "`dpsgd schema TABLE`"),
    whole("--input table.csv --schema other.toml --out new", "columns city, day of"),
    whole("--input table.csv --schema table.csv --out new", "table.csv to be TOML"),
    *(
        whole(f"{_WITH_SCHEMA} {flag}", f"no {name} beside --schema",
              f"- {name} + --on-bad-row skip")
        for flag in ("--buckets 10", "--split 8,1,1", "--format criteo-tsv")
        for name in [flag.split()[0]]
    ),
    whole("--input table.csv --out new", "--schema for table.csv, a table. `dpsgd sch",
          "--schema table.toml --on-bad-row skip"),
    whole(_WITH_SCHEMA, "1 of 3 are malformed: table.csv:4: age is not a number",
          "--on-bad-row skip"),
    whole("", "Missing option '--input'"),
    whole("--input text", "Missing option '--out'", "--out new"),
    number("--format", "csv", "'csv' is not 'criteo-tsv'", "criteo-tsv"),
    number("--buckets", "0", "--buckets=0 >= 2", "2"),
    number("--buckets", "1", "--buckets=1 >= 2", "2"),
    number("--buckets", "99999999999", "--buckets=99999999999 <= 2147483647", "1000"),
    number("--buckets", "10,10", "one or 26 values of --buckets; there are 2", "10"),
    number("--buckets", "x", "--buckets='x' to be integers", "10"),
    number("--buckets", "''", "--buckets='' to be integers", "10"),
    number("--split", "80,20", "three shares, not 2", "80,10,10"),
    number("--split", "x", "--split='x' to be integers", "80,10,10"),
    number("--split", "0,50,50", "train share of --split=0 >= 1", "1,50,50"),
    number("--split", "80,-1,21", "share of --split=-1 >= 0", "80,0,20"),
    row("--vocabulary nosuch", "nosuch to exist", "- --vocabulary"),
    row("--vocabulary list.json", 'keys among "C1" to "C26"', "- --vocabulary"),
    row("--vocabulary wrong.json", 'keys among "C1" to "C26"', "- --vocabulary"),
    row("--on_badrow=skip", "Did you mean --on-bad-row?"),
    number("--on-bad-row", "nosuch", "'nosuch' is not one of 'fail', 'skip'", "skip"),
    number("--row-group-rows", "0", "--row-group-rows=0 >= 1", "1"),
    *not_a("integer", "--row-group-rows", "x", "100"),
    number("--threads", "0", "--threads=0 >= 1", "1"),
    number("--threads", "-1", "--threads=-1 >= 1", "1"),
    *not_a("integer", "--threads", "x", "1"),
    number("--runner", "NoSuch", "runner='NoSuch'", "FnApiRunner"),
    row("--runner FnApiRunner --nosuch", "--nosuch to be an option", "- --nosuch"),
    row("--runner FnApiRunner --threads 2", "no --threads beside", "- --threads"),
    whole(_WITH_USERS, "--max-examples-per-user and --num-examples beside column age",
          "--max-examples-per-user 2 --num-examples 9"),
    whole(f"{_WITH_USERS} --max-examples-per-user 0 --num-examples 9",
          "max_examples_per_user=0 >= 1", "--max-examples-per-user 1"),
    whole(f"{_WITH_USERS} --max-examples-per-user 2 --num-examples 9 --memory-limit 1",
          "memory_limit=1 >= 268435456", "--memory-limit 1GiB"),
    whole(f"{_WITH_USERS} --keep-users --num-examples 9",
          "no --num-examples beside --keep-users", "- --num-examples"),
    row("--keep-users", "no --keep-users without a column of kind user",
        "- --keep-users"),
    row("--max-examples-per-user 2", "without a column of kind user",
        "- --max-examples-per-user"),
    row("--input bad.txt", "1 of 21 are malformed: bad.txt:2: not 40 fields",
        "--on-bad-row skip"),
    *UNKNOWN,
]  # fmt: skip

PLAN = [
    whole("", "Missing option '--num-examples'"),
    whole("--num-examples 1000", "Missing option '--batch-size'"),
    whole("--num-examples 1000 --batch-size 10", "Missing option '--delta'"),
    row("--noise-multiplier 1", "exactly one of --epsilon and --noise-multiplier",
        "- --epsilon"),
    number("--num-examples", "0", "num_examples=0 >= 1", "1000"),
    number("--num-examples", "-1", "num_examples=-1 >= 1", "1000"),
    *not_a("integer", "--num-examples", "x 1e6", "1000"),
    *batch_sizes(1000),
    *STEPS,
    number("--epochs", "99999999999", "num_steps=9999999999900 <= 1000000000", "1"),
    *epsilons(least=">= 0"),
    *DELTAS,
    *SAMPLERS,
    row("- --epochs + --num-steps 7 --sampler dynamic-shuffle",
        "steps_per_epoch=7 to be 100", "- --num-steps + --epochs 1"),
    number("--relation", "nosuch", "'nosuch' is not one of", "replace_special"),
    number("--max-examples-per-user", "51", "max_examples_per_user=51 <= 50", "50"),
    number("--max-examples-per-user", "1,51", "max_examples_per_user=51 <= 50", "1,2"),
    number("--max-examples-per-user", "x", "'x' is no list of integers", "1,2"),
    row("--max-examples-per-user 1,2 --sweep max-examples-per-user --values 3",
        "no --values beside 2 values of --max-examples-per-user", "- --values"),
    row("- --epsilon --sampler + --noise-multiplier 2 --tan --sweep epochs "
        "--max-examples-per-user 2", "--tan or users with several examples, not both",
        "- --max-examples-per-user"),
    row("--relation add_or_remove_one", "to be 'REPLACE_SPECIAL'",
        "--relation REPLACE_SPECIAL"),
    row("--truncated-batch-size 50", "no truncated_batch_size=50 beside --sampler",
        "- --truncated-batch-size"),
    row("--sampler truncated-poisson --truncated-batch-size x", "to be 'auto' or an in",
        "--truncated-batch-size auto"),
    row("--sampler truncated-poisson --truncated-batch-size 5",
        "truncated_batch_size=5 >= 10", "--truncated-batch-size 100"),
    row("--sampler truncated-poisson --truncated-batch-size 1001",
        "truncated_batch_size=1001 <= 1000", "--truncated-batch-size 1000"),
    number("--sweep", "nosuch", "'nosuch' is not one of 'batch-size'", "epsilon"),
    row("--sweep noise-multiplier", "noise multiplier for a sweep over it",
        "- --epsilon + --noise-multiplier 2"),
    row("--values 1,2", "--sweep beside --values", "--sweep epsilon"),
    row("--sweep epochs --values 1.5,2", "values=1.5 of a sweep over epochs to be an",
        "--values 1,2"),
    row("--sweep epochs --values x", "'x' is no list of numbers such as 1,2,4",
        "--values 1,2"),
    row("--sweep epochs --values ''", "'' is no list of numbers", "--values 1,2"),
    row("--sweep epochs --values 0,1", "epochs=0 >= 1", "--values 1"),
    row("--sweep epsilon --values nan", "values=nan to be finite", "--values 1"),
    row("--sweep epsilon --values=-1,1", "epsilon=-1.0 >= 0", "--values 1"),
    row("--sweep delta --values 0.5", "delta=0.5 < 0.01", "--allow-large-delta"),
    row("--sweep batch-size --values 2000", "expected_batch_size=2000 <= 1000",
        "--values 100"),
    row("--sampler truncated-poisson --truncated-batch-size 99 --sweep batch-size",
        "no truncated_batch_size=99 where batch sizes vary",
        "--truncated-batch-size auto"),
    row("- --epochs + --num-steps 100 --sweep num-steps --values 150",
        "steps_per_epoch=150 to be 100", "- --sampler + --sampler poisson"),
    row("--tan", "--sweep beside --tan",
        "- --epsilon --sampler + --noise-multiplier 3 --sweep num-examples"),
    row("--tan --sweep epochs", "--noise-multiplier beside --tan",
        "- --epsilon --sampler + --noise-multiplier 3"),
    row("- --epsilon + --noise-multiplier 2 --tan --sweep epochs",
        "sampler='deterministic' to be one of poisson", "- --sampler"),
    row("- --epsilon --sampler + --noise-multiplier 2 --tan --sweep epsilon",
        "a sweep that answers epsilon, not --sweep epsilon", "--sweep epochs"),
    row("- --epsilon --sampler + --noise-multiplier 0 --tan --sweep noise-multiplier",
        "noise_multiplier=0.0 > 0", "--noise-multiplier 2 --values 2"),
    row("--epsilon nan --sweep epsilon", "epsilon=nan to be finite", "--epsilon 2"),
    row("- --epsilon --sampler + --noise-multiplier 2 --tan --sweep noise-multiplier "
        "--values 0.01", "noise_multiplier=0.01 to be from 0.2 to 200", "--values 1"),
    row("- --epsilon --sampler + --noise-multiplier 2 --also-num-steps 7",
        "--tan beside --also-num-steps", "--tan --sweep noise-multiplier --values 2"),
    row("- --epsilon --sampler + --noise-multiplier 2 --tan --also-num-steps 7 "
        "--sweep epochs", "--sweep noise-multiplier beside --also-num-steps",
        "--sweep noise-multiplier --values 2"),
    row("--mix-width 0.1", "--l2-norm-clip beside --mix-width",
        "- --sampler + --l2-norm-clip 1"),
    row("--l2-norm-clip 1", "--mix-width beside --l2-norm-clip", "- --l2-norm-clip"),
    row("--linf-factor 4", "--mix-width beside --linf-factor", "- --linf-factor"),
    row("--mix-width 0.1 --l2-norm-clip 1", "sampler='deterministic' to be 'poisson'",
        "- --sampler"),
    row("- --sampler + --mix-width 0.1 --l2-norm-clip 1 --relation add_or_remove_one",
        "to be 'REPLACE_SPECIAL' for ModelMix. Omit --relation", "- --relation"),
    row("- --sampler + --mix-width 0.1 --l2-norm-clip 1 --max-examples-per-user 2",
        "max_examples_per_user=2 to be 1 for ModelMix", "- --max-examples-per-user"),
    row("- --epsilon --sampler + --noise-multiplier 2 --mix-width 0.1 "
        "--l2-norm-clip 1 --tan --sweep epochs", "--tan or --mix-width, not both",
        "- --tan"),
    row("--num-examples 1 --batch-size 1 --sweep batch-size", "num_examples=1 >= 2",
        "--sweep epochs"),
    row("--plot nosuch/a.png", "folder of plot='nosuch/a.png' to exist",
        "- --plot"),
    row("--plot a.xyz", "plot='a.xyz' to end in one of", "- --plot"),
    *UNKNOWN,
]  # fmt: skip

DEMO = [
    number("--rows", "49999", "rows=49999 >= 50000", "50000"),
    number("--rows", "0", "rows=0 >= 50000", "50000"),
    *not_a("integer", "--rows", "x", "50000"),
    *epsilons(),
    *DELTAS,
    *UNKNOWN,
]

FIT = [
    whole("", "Expected TABLE, here or in --config"),
    row("- --epsilon", "Expected --epsilon, here or in --config", "--epsilon 3"),
    row("- --numeric", "the kind of age (one of --numeric", "--numeric age"),
    row("- --label + --category income", "which column to predict (--label NAME)",
        "- --category + --label income"),
    row("--user age - --numeric", "--max-examples-per-user K --num-examples N",
        "--max-examples-per-user 2 --num-examples 9"),
    number("--label", "nosuch", "nosuch", "income"),
    number("--numeric", "nosuch", "nosuch", "age"),
    row("--schema nosuch", "--schema nosuch to be readable", "- --schema"),
    row("--config nosuch", "--config nosuch is not readable", "- --config"),
    number("--out", "input", "--out input to be new", "new"),
    *epsilons(),
    *DELTAS,
    *UNKNOWN,
]  # fmt: skip

TRAIN = [
    whole("", "Missing option '--batches'"),
    row("--initial-weights w.npz", "Add --initial-weights-are-public",
        "- --initial-weights"),
    row("--initial-weights-are-public", "declares nothing without",
        "- --initial-weights-are-public"),
    row("--initial-weights no.npz --initial-weights-are-public",
        "initial_weights=no.npz to be a file",
        "- --initial-weights --initial-weights-are-public"),
    row("--aggregate own:f", "aggregate='own:f' gets no iterates",
        "- --aggregate"),
    row("--aggregate own:f --tail 2", "own.py has none of that name",
        "- --aggregate"),
    row("--train-over custom --tail 2", "Add --aggregate and --tail",
        "- --train-over"),
    row("--evaluate-averages", "add --ema-decay or --tail", "--tail 2"),
    whole("--batches batches", "Missing option '--out'"),
    row("- --noise-multiplier", "either --epsilon with --delta, or --noise-multiplier",
        "--noise-multiplier 1"),
    row("--epsilon 3", "either --epsilon with --delta, or --noise-multiplier",
        "- --noise-multiplier + --delta 1e-6"),
    row("- --noise-multiplier + --epsilon 3", "epsilon=3.0 is not complete",
        "--delta 1e-6"),
    row("--batches nosuch", "nosuch/manifest.json to exist"),
    number("--l2-norm-clip", "0", "l2_norm_clip=0.0 >= 1e-10", "1"),
    number("--l2-norm-clip", "nan", "l2_norm_clip=nan to be finite", "1"),
    number("--noise-multiplier", "-1", "noise_multiplier=-1.0 >= 0", "1"),
    *(
        dataclasses.replace(each, flags=f"- --noise-multiplier + --delta 1e-6 "
                            f"{each.flags}")
        for each in epsilons()
    ),
    *DELTAS,
    number("--method", "nosuch", "'nosuch' is not one of 'dp-sgd'", "dp-sgd"),
    row("--method non-private", "has no --epsilon, --delta, --noise-multiplier,",
        "- --noise-multiplier - --l2-norm-clip"),
    row("--method bam", "--bam-radius for method='bam'", "--bam-radius 0.01"),
    row("--method dp-sat", "--sat-radius for method='dp-sat'", "--sat-radius 0.05"),
    row("--method bam --bam-radius -1", "bam_radius=-1.0 >= 0", "--bam-radius 0"),
    row("--bam-radius 0.01", "no bam_radius=0.01 for method='dp-sgd'",
        "--method bam"),
    row("--method model-mix --mix-width 0.1", "--optimizer sgd for method='model-mix'",
        "--optimizer sgd"),
    row("--method model-mix --optimizer sgd", "--mix-width for method='model-mix'",
        "--mix-width 0.1"),
    number("--optimizer", "nosuch", "optimizer='nosuch' to be one of sgd", "sgd"),
    number("--learning-rate", "0", "learning_rate=0.0 > 0", "0.1"),
    number("--learning-rate-schedule", "nosuch", "'nosuch' is not one of", "cosine"),
    number("--warmup-steps", "-1", "warmup_steps=-1 >= 0", "0"),
    number("--final-learning-rate-fraction", "0", "fraction=0.0 > 0", "1"),
    row("--model nosuch", "Give --model as module:function", "- --model"),
    row("--model nosuch:f", "there is no module 'nosuch'", "- --model"),
    row("--loss nosuch:f", "there is no module 'nosuch'", "- --loss"),
    row("--metric own:f", "own.py has none of that name", "- --metric"),
    number("--eval", "table.csv", "table.csv to be an intact Parquet", "data/test"),
    row("--batchs batches", "Did you mean --batches?", "- --batchs"),
    *(
        row(f"{flag} 32", f"make other batches by `dpsgd batches {flag}`", f"- {flag}")
        for flag in ("--batch-size", "--epochs", "--sampler")
    ),
    row("--lr 1", "'--lr'. Did you mean --learning-rate?"),
    row("--clip 1", "'--clip'. Did you mean --l2-norm-clip?"),
    row("--loss mse", "poisson. Did you mean mean_squared_error?"),
    row("--l2_norm_clip 1", "Did you mean --l2-norm-clip?", "- --l2_norm_clip"),
    number("--loss", "nosuch", "loss='nosuch' to be one of", "binary_crossentropy"),
    row("--metric nosuch", "Give --metric as module:function", "- --metric"),
    number("--embedding-dim", "0", "embedding_dim=0 >= 1", "1"),
    number("--hidden", "0", "hidden=0 >= 1", "1"),
    number("--hidden", "a", "'a' is not a valid integer", "64,32"),
    number("--init-seed", "-1", "init_seed=-1 >= 0", "0"),
    number("--ema-decay", "1", "ema_decay=1.0 < 1", "0.9"),
    number("--tail", "0", "tail=0 >= 1", "1"),
    row("--train-over ema", "train_over='ema' needs that average", "--ema-decay 0.9"),
    row("--aggregate-from 3 --tail 2", "aggregate_from=3 does not say",
        "--train-over uta"),
    number("--keep-last", "1000", "keep_last=1000 iterates", "3"),
    row("--uncertainty 0.9", "=0.9 is made from kept iterates", "--keep-last 3"),
    row("--uncertainty 2 --keep-last 3", "uncertainty=2.0 < 1", "--uncertainty 0.9"),
    row("--embedding-noise lazy", "--embedding-noise lazy is not exact here",
        "--optimizer sgd"),
    row("--noise-key-file new/k", "--noise-key-file new/k outside of --out new",
        "- --noise-key-file"),
    number("--eval-every", "0", "eval_every=0 >= 1", "1"),
    number("--checkpoint-every", "0", "checkpoint_every=0 >= 1", "1"),
    number("--worker-timeout", "0", "worker_timeout=0.0 > 0", "1"),
    row("--csv new/a.csv", "--csv new/a.csv outside of --out new", "--csv a.csv"),
    row("--tensorboard new/a", "--tensorboard new/a outside of", "--tensorboard a"),
    *UNKNOWN,
]  # fmt: skip

ACCOUNT = [
    whole("", "--sampler is missing. Name a run, or give the flags"),
    whole("nosuch", "nosuch/run_record.json to exist"),
    whole("--sampler poisson", "--num-examples is missing"),
    row("- --epochs", "exactly one of --epochs and --num-steps", "--epochs 1"),
    *STEPS,
    *batch_sizes(1000),
    *DELTAS,
    *SAMPLERS,
    number("--num-examples", "0", "num_examples=0 >= 1", "1000"),
    number("--noise-multiplier", "-1", "noise_multiplier=-1.0 >= 0", "1"),
    number("--noise-multiplier", "nan", "noise_multiplier=nan to be finite", "1"),
    row("--sampler truncated-poisson", "truncated_batch_size=None to be an integer",
        "--truncated-batch-size 100"),
    row("--sampler truncated-poisson --truncated-batch-size 5",
        "truncated_batch_size=5 >= 10", "--truncated-batch-size 100"),
    row("--truncated-batch-size 50", "truncated_batch_size=50 to be None",
        "- --truncated-batch-size"),
    row("- --epochs + --num-steps 7 --sampler deterministic", "steps_per_epoch=7 to be",
        "- --num-steps + --epochs 1"),
    number("--relation", "nosuch", "'nosuch' is not one of", "replace_one"),
    row("--relation REPLACE_ONE --sampler balls-and-bins", "group_size=2",
        "- --relation"),
    number("--max-examples-per-user", "0", "max_examples_per_user=0 >= 1", "2"),
    row("--mix-width 0.1", "mix_width=0.1 needs --l2-norm-clip", "- --mix-width"),
    row("--linf-factor 4", "--mix-width for method='model-mix'", "- --linf-factor"),
    row("--mix-width 0 --l2-norm-clip 1", "mix_width=0.0 > 0", "- --mix-width"),
    row("--mix-width 0.1 --l2-norm-clip 1 --linf-factor 0", "linf_factor=0 >= 1",
        "- --mix-width - --linf-factor"),
    number("--l2-norm-clip", "0", "l2_norm_clip=0.0 > 0", "1"),
    row("--noise-key-file x", "--noise-key-file needs a run",
        "- --noise-key-file"),
    row("--nosuch", "No such option '--nosuch'", "- --nosuch"),
]  # fmt: skip

AUDIT = [
    whole("", "--sampler is missing. Name a run, or give the flags"),
    row("- --noise-multiplier", "exactly one of --noise-multiplier and --epsilon",
        "--epsilon 1"),
    row("--epsilon 1", "exactly one of --noise-multiplier and --epsilon",
        "- --epsilon"),
    number("--trials", "0", "trials=0 >= 100", "100"),
    row("- --noise-multiplier + --noise-multiplier 1e9", "1000000000.0 <= 131072",
        "- --noise-multiplier + --noise-multiplier 1"),
    number("--trials", "99999999999", "trials=99999999999 <= 100000000", "100"),
    number("--confidence", "0.5", "confidence=0.5 > 0.5", "0.9"),
    number("--confidence", "1", "confidence=1.0 < 1", "0.9"),
    number("--level", "nosuch", "'nosuch' is not one of 'mechanism'", "mechanism"),
    number("--claim", "nosuch", "'nosuch' is not one of", "poisson"),
    number("--canary-rows", "0", "canary_rows=0 >= 1", "2"),
    number("--canary-rows", "1001", "canary_rows=1001 <= 50", "2"),
    number("--max-examples-per-user", "0", "max_examples_per_user=0 >= 1", "2"),
    row("--plot nosuch/a.png", "folder of plot='nosuch/a.png' to exist", "- --plot"),
    row("- --epochs + --num-steps 7 --sampler dynamic-shuffle",
        "steps_per_epoch=7 to be 100", "- --num-steps + --epochs 1"),
    *STEPS,
    *DELTAS,
]  # fmt: skip

REPORT = [
    whole("", "Missing argument 'RUN'"),
    whole("nosuch", "nosuch/run_record.json to exist"),
    whole("batches", "batches/run_record.json to exist. Name a folder that `dpsgd tr"),
    row("--out data", "--out data to be a file; it is a folder",
        "--out report.html"),
    row("--out nosuch/a.html", "folder of --out nosuch/a.html to exist",
        "--out a.html"),
    row("--out list.json", "--out list.json not to exist", "--out a.html"),
    row("--audit nosuch", "nosuch to exist. Make it with `dpsgd audit RUN --json",
        "- --audit"),
    row("--audit list.json", "list.json to be an audit", "- --audit"),
    row("--comparison data", "data/comparison.json to exist", "- --comparison"),
    row("--comparison wrong.json", "to be a comparison", "- --comparison"),
    row("--noise-key-file nosuch", "key file nosuch to exist", "- --noise-key-file"),
    *DELTAS,
    *UNKNOWN,
]  # fmt: skip

TRAIN_FLAGS = [
    row("--init-seed 3", "--init-seed is set for every run", "- --init-seed"),
    row("--nosuch", "No such option '--nosuch'", "- --nosuch"),
    row("extra", "unexpected extra argument (extra)", "- extra"),
    row("--method bam", "--bam-radius for method='bam'", "--bam-radius 0.01"),
    row("--metric nosuch", "metric='nosuch' to be one of auc", "--metric auc"),
    row("--model nosuch:f", "there is no module 'nosuch'", "- --model"),
    row(
        "--initial-weights nosuch.npz --initial-weights-are-public",
        "initial_weights=nosuch.npz to be a file",
        "- --initial-weights --initial-weights-are-public",
    ),
    row("--views 2", "views=2 of an example in the batches", "- --views"),
    row("--keep-last 99", "keep_last=99 iterates", "--keep-last 3"),
    row("--eval nosuch", "files at --eval nosuch; there are none", "--eval data/test"),
    number("--l2-norm-clip", "0", "l2_norm_clip=0.0 >= 1e-10", "1"),
]

BUDGET = [
    *DELTAS,
    *UNKNOWN,
    number("--runs", "0", "runs=0 >= 1", "1"),
    number("--runs", "1001", "runs=1001 <= 1000", "1000"),
    *not_a("integer", "--runs", "x 1.5", "1"),
    number("--epsilon", "0", "epsilon=0.0 > 0", "1"),
    *not_a("float", "--epsilon", "x", "1"),
    number("--batches", "nosuch", "nosuch/manifest.json to exist", "batches"),
    row("- --epsilon", "--epsilon beside --runs", "--epsilon 3"),
    row("- --delta", "--delta beside --runs", "--delta 1e-6"),
    row("- --batches", "--batches beside --runs", "--batches batches"),
    row("- --runs", "--runs beside --batches", "--runs 2"),
    whole("nosuch", "budget=nosuch to be a file"),
    whole("list.json", "a budget"),
]
STATISTICS = [
    *DELTAS,
    *UNKNOWN,
    number("--epsilon", "0", "epsilon=0.0 > 0", "9"),
    number("--epsilon", "0.1", "rows for ranges of 1 columns at epsilon=0.1", "9"),
    *not_a("float", "--epsilon", "x", "9"),
    number("--input", "nosuch", "nosuch", "numbers/val"),
    number("--input", "data/test", "to be prepared with this --schema", "numbers/val"),
    number("--schema", "nosuch", "nosuch to be a readable schema", "numbers.toml"),
    number("--out", "list.json", "--out list.json to be new", "new"),
    row("- --epsilon", "Missing option '--epsilon'", "--epsilon 9"),
    row("- --delta", "Missing option '--delta'", "--delta 1e-6"),
    row("- --out", "Missing option '--out'", "--out new"),
]
TUNE = [
    whole("", "Missing option '--input'"),
    *DELTAS,
    *EPOCHS,
    *not_a("float", "--epsilon", "x", "90"),
    number("--epsilon", "0", "epsilon=0.0 > 0", "90"),
    number("--input", "nosuch", "nosuch", "data/train"),
    number("--score", "nosuch", "nosuch", "data/val"),
    number("--score", "data/train", "to hold no training examples", "data/val"),
    number("--out", "data", "--out data to be new", "new"),
    number("--runs", "1", "runs=1 >= 2", "2"),
    number("--runs", "1000", "runs=1000 <= 100", "2"),
    *not_a("integer", "--runs", "x 1.5", "2"),
    number("--batch-size", "0", "expected_batch_size=0 >= 1", "16"),
    row("--epsilon-of-score 0", "epsilon_of_score=0.0 > 0", "- --epsilon-of-score"),
    row("--epsilon-of-score 0.01", "rows in --score data/val",
        "- --epsilon-of-score"),
    row("--by f1", "'f1' is not one of", "--by auc"),
    row("--nosuch 1", "'--nosuch'", "- --nosuch"),
    row("--or 'nosuch 1'", "nosuch", "- --or"),
    row("--or '\"8'", "Close the quotation", "- --or"),
    row("--learning-rate 0,1", "learning_rate=0.0 > 0", "--learning-rate 0.1,1"),
    row("--noise-multiplier 1", "set for every run", "- --noise-multiplier"),
    row("--budget table.budget", "set for every run", "- --budget"),
    row("--method non-private", "has no --epsilon", "--method bam --bam-radius 0.1"),
    row("--loss mean_squared_error", "one of two or more classes", "- --loss"),
]  # fmt: skip
EVALUATE = [
    *DELTAS,
    *UNKNOWN,
    number("--epsilon", "0", "epsilon=0.0 > 0", "9"),
    number("--epsilon", "inf", "epsilon=inf to be finite", "9"),
    *not_a("float", "--epsilon", "x", "9"),
    number("--largest-loss", "0", "largest_loss=0.0 > 0", "4"),
    *not_a("float", "--largest-loss", "x", "4"),
    number("--average", "nosuch", "'nosuch' is not one of 'last'", "last"),
    number("--average", "ema", "average='ema' to be one that run has: last", "last"),
    row("--budget nosuch", "Expected no --epsilon beside --budget", "- --budget"),
    whole("run --batches batches --input data/test --budget nosuch", "to be a file"),
    number("--input", "nosuch", "nosuch", "data/test"),
    number("--input", "data/train", "to hold no training examples", "data/test"),
    number("--batches", "nosuch", "nosuch/manifest.json to exist", "batches"),
    whole("nosuch --batches batches --input data/test", "nosuch/run_record.json"),
    whole("run --batches batches", "Missing option '--input'"),
    whole("run --input data/test", "Missing option '--batches'"),
]
COMPARE = [
    whole("", "Missing option '--input'"),
    *TRAIN_FLAGS,
    *epsilons(),
    *DELTAS,
    *batch_sizes(160),
    *EPOCHS,
    *SAMPLERS,
    number("--seeds", "0", "seeds=0 >= 1", "1"),
    number("--learning-rate", "0", "learning_rate=0.0 > 0", "0.1"),
    row("--method model-mix", "--mix-width for method='model-mix'",
        "--mix-width 0.1,0.2 --optimizer sgd"),
    row("--noise-multiplier 1", "exactly one of --epsilon and --noise-multiplier",
        "- --noise-multiplier"),
    number("--noise", "most", "'most' is not one of 'same', 'own', 'optimistic'",
           "own,optimistic"),
    whole(BASES["compare"].replace("--epsilon 1", "--noise-multiplier 1 --noise own"),
        "noise='own' needs a target_epsilon", "- --noise"),
    number("--epsilon", "1,x", "'x' is not a valid float", "1,2"),
    number("--jobs", "0", "jobs=0 >= 1", "2"),
    number("--memory-limit", "0", "memory_limit=0 >= 1", "1GiB"),
    row("--for bam '--bam-radius 0.1'", "--for bam to name one of the methods",
        "--method bam"),
    row('--for dp-sgd "--hidden \'4"', "No closing quotation"),
    row("--num-users 9", "--num-users needs --user-column", "- --num-users"),
    row("--user-column label", "--user-column needs --max-examples-per-user",
        "- --user-column"),
    row("--user-column who --max-examples-per-user 1,2 --num-users 99",
        "--user-column who to be a column",
        "- --user-column --max-examples-per-user --num-users"),
]  # fmt: skip

BIAS = [
    whole("", "Missing option '--batches'"),
    whole(BASES["bias"].replace("--data-is-public", ""),
        "covers the bias of clipping", "--data-is-public"),
    whole(BASES["bias"].replace("--bam-radius 0.1", ""),
        "--bam-radius for method='bam'", "--bam-radius 0.1"),
    row("--nosuch", "No such option '--nosuch'", "- --nosuch"),
    row("extra", "unexpected extra argument (extra)", "- extra"),
    row("--batches nosuch", "nosuch", "--batches batches"),
    row("--eval nosuch", "nosuch", "--eval data/test"),
    row("--method dp-sat", "no --bam-radius: --method bam", "--method bam"),
    row("--method dp-sat --method bam --method bam", "each method once"),
    row("--non-private-diagnostics", "--non-private-diagnostics is set for every run",
        "- --non-private-diagnostics"),
    row("--embedding-noise lazy --optimizer sgd", "--embedding-noise lazy"),
    number("--bam-radius", "-1", "bam_radius=-1.0 >= 0", "0.1"),
    number("--l2-norm-clip", "0", "l2_norm_clip=0.0 >= 1e-10", "1"),
    number("--learning-rate", "0", "learning_rate=0.0 > 0", "0.1"),
]  # fmt: skip

SIMULATE = [
    whole("", "Missing option '--input'"),
    *TRAIN_FLAGS,
    *STEPS,
    *DELTAS,
    row("--epsilon 1", "exactly one of --epsilon and --noise-multiplier",
        "- --epsilon"),
    number("--noise-multiplier", "0", "noise_multiplier=0.0 > 0", "1"),
    *(
        number("--small-batch-sizes", value, says, "4,8")
        for value, says in [
            ("4", "small_batch_sizes='4' to hold two sizes or more"),
            ("4,x", "'x' is not a valid integer"),
            ("4,4", "small_batch_sizes='4,4' to hold each size once"),
            ("4,64", "=64 <= 31"), ("0,8", "=0 >= 1"),
        ]
    ),
    number("--batch-size", "0", "batch_size=0 >= 1", "32"),
    number("--batch-size", "9999", "=9999 <= 160. Give --batch-size from 1", "160"),
    number("--seeds", "1", "seeds=1 times 2 batch sizes to be at least 3", "2"),
    number("--confidence", "1", "confidence=1.0 < 1", "0.9"),
    row("--learning-rate 0.1 --learning-rate 0.1", "to hold each value once",
        "- --learning-rate"),
    number("--weights", "ema", "weights='ema' to be one of last", "last"),
    number("--sampler", "balls-and-bins", "'balls-and-bins' is not one of", "poisson"),
]  # fmt: skip

VARIANCE = [
    whole("", "Missing option '--input'"),
    *TRAIN_FLAGS,
    *STEPS,
    *DELTAS,
    *SAMPLERS,
    row("--epsilon 1", "either --epsilon with --delta, or --noise-multiplier",
        "- --epsilon"),
    number("--seeds", "1", "seeds=1 >= 2", "2"),
    number("--keep-last", "1", "keep_last=1 >= 2", "2"),
    number("--keep-last", "99", "keep_last=99 iterates", "3"),
    number("--batch-size", "0", "expected_batch_size=0 >= 1", "16"),
    row("--uncertainty 2", "uncertainty=2.0 < 1", "--uncertainty 0.9"),
]  # fmt: skip

SHIFT = [
    whole("", "Missing option '--input'"),
    *TRAIN_FLAGS,
    row("- --data-is-public", "order of the rows is made", "--data-is-public"),
    number("--period", "1", "period=1 >= 2", "4"),
    number("--period", "90", "Give a shorter --period", "4"),
    number("--batch-size", "0", "batch_size=0 >= 1", "8"),
    number("--shift-by", "nosuch", "shift_by='nosuch' to name a column", "label"),
    number("--shift-by", "integers", "Give integers:INDEX", "integers:0"),
    number("--seeds", "0", "seeds=0 >= 1", "1"),
    row("- --noise-multiplier", "--noise-multiplier", "--noise-multiplier 1"),
]  # fmt: skip

PREDICT = [
    whole("", "Missing argument 'RUN'"),
    whole("run", "Missing option '--input'"),
    whole("run --input data/test", "Missing option '--out'"),
    whole("nosuch --input data/test --out new", "nosuch/run_record.json to exist"),
    number("--input", "nosuch", "--input", "data/test"),
    number("--out", "list.json", "--out list.json to be new", "new"),
    row("--out none/new", "Give `mkdir -p none`"),
    number("--average", "x", "'x' is not one of 'last'", "upa"),
    row("--average ema", "last, upa, opa, omv. Others need --ema-decay",
        "- --average"),
    number("--uncertainty", "1", "uncertainty=1.0 < 1", "0.9"),
    number("--uncertainty", "0", "uncertainty=0.0 > 0", "0.9"),
    row("--aggregate nosuch:f", "there is no module 'nosuch'", "- --aggregate"),
    row("--aggregate json:dumps --average upa", "Omit --average or --aggregate",
        "- --aggregate"),
    row("--uncertainty 0.9 --average upa", "Give --average opa", "--average opa"),
    row("--carry nosuch", "column nosuch in", "- --carry"),
    *not_a("float", "--uncertainty", "x", "0.9"),
    *UNKNOWN,
]  # fmt: skip
BOUND = [
    number("--input", "nosuch", "nosuch", "input"),
    number("--user-column", "none", "it has", "id"),
    *not_a("int", "--max-examples-per-user", "x", "2"),
    number("--max-examples-per-user", "0", "max_examples_per_user=0 >= 1", "2"),
    number("--max-examples-per-user", "51", "max_examples_per_user=51 <= 50", "50"),
    number("--num-examples", "0", "num_examples=0 >= 1", "100"),
    number("--out", "list.json", "--out list.json", "new"),
    number("--memory-limit", "1", "memory_limit=1 >= 268435456", "1GiB"),
    number("--threads", "0", "--threads=0 >= 1", "1"),
    row("--runner FnApiRunner --threads 1", "no --threads beside", "- --threads"),
    row("--runner x", "runner='x' to be one that Beam has here", "- --runner"),
    row("--streaming", "those of Beam go with --runner", "- --streaming"),
]  # fmt: skip
TABLES = {
    "batches": BATCHES, "verify": VERIFY, "synth": SYNTH, "schema": SCHEMA,
    "prepare": PREPARE, "plan": PLAN, "demo": DEMO, "train": TRAIN,
    "account": ACCOUNT, "audit": AUDIT, "compare": COMPARE, "simulate": SIMULATE,
    "predict": PREDICT, "report": REPORT, "bound": BOUND, "fit": FIT,
    "budget": BUDGET, "evaluate": EVALUATE,
    "statistics": STATISTICS, "tune": TUNE,
    "bias": BIAS, "variance": VARIANCE, "shift": SHIFT,
}  # fmt: skip
CALLS = [(command, each) for command, rows in TABLES.items() for each in rows]


class Reached(Exception):  # noqa: N818 (it is none)
    """The command began its work."""


def reached(*_: Any, **__: Any) -> Any:
    raise Reached


#: Where the work of a command begins, if it is no matter of a moment.
WORK = {
    "batches": "pipelines.job.poisson_batching.open_job",
    "demo": "trainer.cli.demo.run_stage",
    "fit": "dpsgd.fit_stages.run_stage",
    "train": "trainer.report.progress.Terminal.say",
    "predict": "trainer.report.progress.Terminal.say",
    "evaluate": "trainer.report.progress.Terminal.say",
    "tune": "trainer.releases.tuning._priced",
    "audit": "trainer.auditing.audit._audit_mechanism",
    "compare": "trainer.experiments.comparison.noise.find_cases",
    "simulate": "trainer.papers.simulate.Simulator",
    "bias": "trainer.papers.bias._train",
    "variance": "trainer.papers.variance.Runs",
    "shift": "trainer.papers.shift.Runs",
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command said, and whether it got to its work."""

    code: Any
    out: str
    lines: list[str]
    worked: bool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Data of every stage."""
    from click.testing import CliRunner

    root = tmp_path_factory.mktemp("calls")
    (root / "input").mkdir()
    table = pa.table({"id": np.arange(100), "label": (np.arange(100) % 2).astype("i1")})
    pq.write_table(table, root / "input" / "a.parquet", row_group_size=25)
    for line in (
        f"synth --rows 200 --out {root}/text",
        f"prepare --input {root}/text --out {root}/data --buckets 10",
        f"batches --input {root}/data/train --out {root}/batches --batch-size 16 "
        "--epochs 1",
    ):
        result = CliRunner().invoke(dpsgd.cli, shlex.split(line))
        assert result.exit_code == 0, result.output
    _write_run(root / "run", read_manifest(root / "batches"))
    ages = "".join(f"{row % 90},{row % 2}\n" for row in range(9_000))
    (root / "numbers.csv").write_text(f"age,income\n{ages}")
    label = '[columns.income]\nkind = "label"\ntask = "binary"\n'
    split = "[split]\nshares = [50, 50, 0]\n"
    numbers = f'version = 1\n{split}[columns.age]\nkind = "numeric"\n{label}'
    (root / "numbers.toml").write_text(numbers)
    line = f"prepare --input {root}/numbers.csv --schema {root}/numbers.toml"
    assert (
        CliRunner().invoke(dpsgd.cli, [*line.split(), f"--out={root}/numbers"])
    ).exit_code == 0
    (root / "list.json").write_text("[1]")
    (root / "own.py").write_text("")
    (root / "wrong.json").write_text('{"C99": ["a"]}')
    (root / "table.csv").write_text("age,income\n39,1\n40,0\nx,1\n")
    label = 'version = 1\n[columns.income]\nkind = "label"\ntask = "binary"\n'
    (root / "table.toml").write_text(f'{label}[columns.age]\nkind = "numeric"\n')
    users = '[columns.age]\nkind = "user"\n[split]\nshares = [1, 0, 0]\n'
    (root / "users.toml").write_text(label + users)
    others = (f'[columns.{name}]\nkind = "category"\n' for name in ("city", "day"))
    (root / "other.toml").write_text(label + "".join(others))
    good = (root / "text").glob("*").__next__().read_text().splitlines()[:20]
    (root / "bad.txt").write_text("\n".join([good[0], "1\t2", *good[1:]]) + "\n")
    return root


def _write_run(run: pathlib.Path, manifest: Manifest) -> None:
    """Writes what a finished run has, as far as is looked at before any work."""
    write_run_folder(run, BatchFolder(run.parent, manifest, []), target_delta=1e-6)
    for name in ("saved_model", "iterates"):
        (run / name).mkdir()
    for step in (1, 2):
        (run / "iterates" / f"step-{step:08d}.npz").touch()
    inputs = tuple(column for column in manifest.columns if column.name != "label")
    serving.write(run, Serving(inputs=inputs, outputs=("probability",), task="binary"))


Call = Callable[[str, list[str]], Answer]


@pytest.fixture
def call(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Call:
    """Runs a command in this process, beside the data, and stops where it works."""
    for path in folder.iterdir():
        os.symlink(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)

    def run(command: str, arguments: list[str]) -> Answer:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(sys, "argv", ["dpsgd", command, *arguments])
        if command in WORK:
            monkeypatch.setattr(WORK[command], reached)
        code: Any = 0
        worked = False
        try:
            dpsgd.main()
        except SystemExit as end:
            code = end.code or 0
            worked = code == 0
        except Reached:
            worked = True
        printed = capfd.readouterr()
        return Answer(code, printed.out, printed.err.splitlines(), worked)

    return run


def mended(arguments: list[str], change: str) -> list[str]:
    """``arguments`` with flags added, or taken away after a minus."""
    words = iter(shlex.split(change))
    removing, result = False, list(arguments)
    for word in words:
        if word in ("+", "-"):
            removing = word == "-"
        elif removing:
            result = removed(result, word)
        else:
            result.append(word)
    return result


def removed(arguments: list[str], flag: str) -> list[str]:
    """Without a flag and its value."""
    result, words = list[str](), iter(arguments)
    taken = False
    for word in words:
        if word != flag:
            if not (taken and not is_flag(word)):
                result.append(word)
            taken = False
        else:
            taken = word.startswith("--") and "=" not in word
    return result


def is_flag(word: str) -> bool:
    return word.startswith("--")


def arguments_of(command: str, each: Row) -> list[str]:
    base = [] if each.whole else shlex.split(BASES[command])
    return mended(base, each.flags)


def test_the_tables_hold_every_command_and_as_many_calls_as_were_tried() -> None:
    assert set(TABLES) == set(command_line.COMMANDS)
    data = ("batches", "verify", "synth", "prepare")
    before = sum(len(TABLES[name]) for name in data)
    assert before >= 117
    assert len(CALLS) - before >= 45


@pytest.mark.parametrize("command", TABLES)
def test_the_base_of_each_table_gets_to_its_work(command: str, call: Call) -> None:
    base = "batches" if command == "verify" else BASES[command]
    answer = call(command, shlex.split(base))
    assert answer.worked, answer.lines


@pytest.mark.parametrize(
    ("command", "each"),
    CALLS,
    ids=[f"{command} {each.flags}" for command, each in CALLS],
)
def test_a_wrong_call_is_one_line_whose_remedy_works(
    command: str, each: Row, call: Call, tmp_path: pathlib.Path
) -> None:
    arguments = arguments_of(command, each)
    answer = call(command, arguments)
    assert answer.code == 2
    assert not answer.worked
    assert answer.out == ""
    *before, line = answer.lines
    assert line.startswith("error: ")
    assert each.says in line
    # What was done before, as the conversion of all lines, may show its progress.
    assert all(told.startswith(("divide: ", "convert: ")) for told in before)
    assert not os.path.lexists(tmp_path / "new")
    if each.remedy is not None:
        again = call(command, mended(arguments, each.remedy))
        assert again.worked, again.lines


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["nosuch"], "No such command 'nosuch'. See --help."),
        (["--nosuch"], "No such option '--nosuch'. See --help."),
        (["trian"], "No such command 'trian'. Did you mean train?"),
        (["Train"], "No such command 'Train'. Did you mean train?"),
        (["--verson"], "No such option '--verson'. Did you mean --version?"),
    ],
)
def test_a_command_that_is_none_is_one_line(
    flags: list[str], says: str, call: Call
) -> None:
    answer = call(flags[0], flags[1:])
    assert answer.code == 2
    [line] = answer.lines
    assert line.startswith("error: ")
    assert says in line
