"""The stages of ``dpsgd fit``: ordinary commands, from a table to a page.

A row is in one part of the table, and pays in that part alone:

    train    trains the model
    val      gives ranges of numeric columns (`dpsgd statistics`)
    test     is evaluated with noise (`dpsgd evaluate`)

All parts have the same epsilon and delta, which are then those of everything together.
A part with too few rows gives no ranges, or no metrics.  Users are bounded in each
part; how many rows of theirs a part has is not public, and is guessed.

What a stage is given depends on public values alone: the choices, numbers of rows, the
schema, and what earlier stages released.  No message depends on what a row holds,
unless it is malformed, or all rows for training are of one class.

A stage is done when its last file is there, and is not made again.  All stages are of
one table: a table that has changed since is refused, because its rows may be in other
parts.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from accounting.cli.command import resolved
from accounting.cli.options import AllowLargeDelta, LocalText, delta_options
from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE
from accounting.core.plan import MOST_RUNS, TRUNCATED_POISSON, steps_per_epoch
from accounting.core.settings import RARE, Field, OfPrivacy
from accounting.core.validation import InputError
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.cli.column_options import ColumnOptions
from pipelines.inputs.source_table import SOURCES
from trainer.cli.demo import run_stage
from trainer.core.claim_names import NON_PRIVATE

if TYPE_CHECKING:
    from trainer.settings.train_settings import TrainSettings

RANGES = "ranges.toml"
#: Way of a split, as ``pipelines.tables.schema`` names it.
RANDOM = "random"
_ORDERED = (
    ' Is the table in order of its label? Write by = "random" in [split] of a --schema.'
)
#: Task of a label, as ``pipelines.tables.kinds`` names it.
REGRESSION = "regression"
#: Of the asked, those of users for `dpsgd prepare`.
OF_USERS = ("max_examples_per_user", "num_examples")
_PREPARED = "_prepared.json"
#: The record of a run, as ``trainer.core.run.run_record`` names it.
_RECORD = "run_record.json"

#: Steps that a run should have at least, in at most this many epochs.
_STEPS, _MOST_EPOCHS = 500, 8


@resolved
@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(ColumnOptions):
    """Options of ``dpsgd fit``.

    Attributes:
      label: Column to predict.
      epsilon: Target epsilon.
      delta: [default: a power of ten, at most 0.1 / training rows]
      schema: Instead of the options on columns: see dpsgd schema.
      rows_are_independent: Declare that no person has several rows: needed without
        --user.
      max_examples_per_user: With --user: rows kept per person.
      num_examples: With --user: public bound on the rows kept for training.
      on_bad_row: Malformed rows: refuse the table, or omit them.  [default: fail]
      batch_size: [default: the power of two nearest to twice the root of the training
        rows]
      epochs: [default: for 500 steps, but at most 8]
      bands: Banded noise of so many bands: see dpsgd batches.  [default: by the rule,
        or 1 for rows of a user, and for what needs independent noise]
      train: Options for dpsgd train, such as "--hidden 32 --ema-decay 0.99".
      of_runs: Noise for so many such fits of this table together, declared before the
        first: each in a folder of its own, by the same plan and split.
      dry_run: End after the noise, before any sampling.
      out: New folder, or that of the same choices.  [default: TABLE-fit]
      table: The table.
    """

    epsilon: Annotated[float | None, OfPrivacy] = None
    delta: Annotated[float | None, OfPrivacy] = None
    allow_large_delta: AllowLargeDelta = False
    schema: LocalText | None = None
    rows_are_independent: bool = False
    max_examples_per_user: Annotated[int | None, Field(ge=1), RARE] = None
    num_examples: Annotated[int | None, Field(ge=1), RARE] = None
    on_bad_row: Annotated[Literal["fail", "skip"] | None, RARE] = None
    batch_size: Annotated[int | None, Field(ge=1), RARE] = None
    epochs: Annotated[int | None, Field(ge=1), RARE] = None
    bands: Annotated[int | None, Field(ge=1), Parameter(metavar="K"), RARE] = None
    train: Annotated[
        str, Parameter(metavar="OPTIONS", allow_leading_hyphen=True), RARE
    ] = ""
    of_runs: Annotated[int, Field(ge=1, le=MOST_RUNS), Parameter(metavar="N"), RARE] = 1
    dry_run: Annotated[bool, RARE] = False
    out: LocalText | None = None
    table: Annotated[str, Parameter(parse=False)] = ""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command, or nothing where a stage is left out.

    Attributes:
      title: What it does, in words.
      last: File that is there when it is done; None to run it each time.
      arguments: Arguments of the command; empty for none.
      remedy: What to do, beside what the command says, if it fails.
    """

    title: str
    last: pathlib.Path | None = None
    arguments: tuple[str, ...] = ()
    remedy: str = ""

    @property
    def is_done(self) -> bool:
        """Whether it is left out or done; a run is done if its record says so."""
        if not self.arguments:
            return True
        if self.last is None or not self.last.exists():
            return False
        if self.last.name == _RECORD:
            return bool(json.loads(self.last.read_bytes())["complete"])
        return True


def sources_of(table: str) -> frozenset[str]:
    """Returns digests of the files of a table, of which samples alone are read.

    Args:
      table: A file, a folder or a glob.

    Raises:
      InputError: as for `table_files.list_table`.
    """
    from pipelines.inputs.source_table import read_from  # after --help
    from pipelines.tables.table_files import list_table

    return frozenset(read_from(file.path for file in list_table(table))[SOURCES])


def run(
    out: pathlib.Path, asked: FitOptions, sources: frozenset[str], *, aside: bool
) -> None:
    """Runs the stages that are not done.

    Args:
      out: Folder with the schema and all results.
      asked: Options of the command.
      sources: From `sources_of`.
      aside: Whether standard output is left for JSON.
    """
    columns = _columns(out)
    count = 6 + 2 * bool(columns)
    for number, stage in enumerate(_stages(out, asked, sources, columns), start=1):
        if not stage.is_done:
            run_stage(
                number, count, stage.title, [*stage.arguments],
                aside=aside, remedy=stage.remedy,
            )  # fmt: skip


def _prepared_first(out: pathlib.Path, columns: int) -> pathlib.Path:
    """Returns the folder of prepared rows of which sizes are known first."""
    first, data = ((out / name / _PREPARED).exists() for name in ("first", "data"))
    # While the first one is there, the other may be of a table that has changed.
    return out / "first" if columns and (first or not data) else out / "data"


def _stages(
    out: pathlib.Path, asked: FitOptions, sources: frozenset[str], columns: int
) -> Iterator[Stage]:
    """Yields the stages, each after the one before has run."""
    first = _prepared_first(out, columns)
    print(f"\n{_split_in_words(_schema(out).split)}", file=sys.stderr)
    yield _prepare(out, asked, first, "schema.toml")
    _check_sources(first, sources)
    _check_classes(first / "train", _schema(out))
    sizes = _Sizes.of(first, asked)
    yield Stage("compute the noise", None, _plan(sizes, asked))
    if asked.dry_run:
        return
    is_evaluated = _is_evaluated(out, first, asked, sizes)
    if columns:
        yield _ranges(out, sizes, first, columns)
        schema = RANGES if (out / RANGES).exists() else "schema.toml"
        yield _prepare(out, asked, out / "data", schema)
        _check_sources(out / "data", sources)
        shutil.rmtree(out / "first", ignore_errors=True)
    yield from _train(out, asked, sizes)
    yield _evaluate(out, sizes.allowance, is_evaluated)
    page = out / "report.html"
    source = pathlib.PurePath(asked.table.rstrip("/*"))
    name = out.name if source.parent.name == PRIVATE_NAME else source.name
    claim = ""
    if (out / "run" / _RECORD).exists():  # it was made by the stages before
        claim = together(out, published(out / "run", asked), asked)
    given = (
        f"{out}/run", f"--out={page}", f"--title=Privacy report: {name}",
        f"--together={claim}",
    )  # fmt: skip
    yield Stage("write the page", page, ("report", *given))


def settings_of_run(asked: FitOptions) -> TrainSettings:
    """Returns how the run trains, but for epsilon and delta.

    Args:
      asked: Options of the command.

    Raises:
      InputError: `dpsgd train` would refuse it, it is not private, or it needs noise
        that is independent between steps, and bands were asked for.
    """
    from trainer.cli.train_command import train_request  # after --help

    words = shlex.split(asked.train)
    if NON_PRIVATE in " ".join(words).replace("=", " ").split():
        raise InputError(
            "Expected a private method in --train: fit states an epsilon for all that "
            f"it releases. Omit --method {NON_PRIVATE}; `dpsgd compare` trains both."
        )
    # `dpsgd train` requires a target, which says nothing about the rest.
    settings = train_request(["--epsilon=1", "--delta=1e-9", *words]).settings
    found = _independent(asked, settings)
    if (asked.bands or 1) > 1 and found is not None:
        raise InputError(
            f"Expected no --bands={asked.bands} beside {found}, which needs noise that "
            "is independent between steps. Omit one."
        )
    return settings


def _independent(asked: FitOptions, settings: TrainSettings) -> str | None:
    """Returns what needs independent noise of all that the run asks for."""
    from trainer.run.preflight import needs_independent_noise  # after --help

    if (asked.max_examples_per_user or 1) > 1:
        return "--max-examples-per-user"
    return needs_independent_noise(settings)


def _permits_bands(asked: FitOptions) -> bool:
    """Whether noise of bands is proven, and excludes no lazy noise by default."""
    from trainer.settings.train_settings import DENSE_NOISE  # after --help

    settings = settings_of_run(asked)
    is_dense = settings.embedding_noise == DENSE_NOISE
    permits = is_dense or settings.lazy_obstacle is not None
    return permits and _independent(asked, settings) is None


@functools.cache
def _best_bands(
    num_rows: int, batch: int, epochs: int, epsilon: float, delta: float, of_runs: int
) -> int:
    """Returns the number of bands by the rule, and says it once."""
    from accounting.bands import best_bands  # after --help: SciPy

    found = best_bands(
        num_examples=num_rows,
        expected_batch_size=batch,
        num_steps=epochs * steps_per_epoch(num_rows, batch),
        epsilon=epsilon,
        delta=delta,
        of_runs=of_runs,
    )
    print(f"\nbands: {found.in_words}", file=sys.stderr)
    return found.bands


def _train(out: pathlib.Path, asked: FitOptions, sizes: _Sizes) -> Iterator[Stage]:
    of_batches = (f"--input={out}/data/train", f"--out={out}/batches")
    yield Stage(
        "sample the batches",
        out / "batches" / "manifest.json",
        ("batches", *of_batches, *sizes.sampling, *sizes.banded),
    )
    of_run = (*sizes.target, *sizes.together, *shlex.split(asked.train))
    yield Stage(
        "train with differential privacy",
        out / "run" / _RECORD,
        ("train", f"--batches={out}/batches", f"--out={out}/run", *of_run),
    )


def _split_in_words(split: Any) -> str:
    """Returns which rows train, give ranges and are held out."""
    if split.by == "time":
        return (
            f"Rows before {split.val_from} in column {split.column} train, those from "
            f"{split.test_from} on are held out, and those between give ranges."
        )
    train, val, test = (f"{share / sum(split.shares):.0%}" for share in split.shares)
    by_hash = f"by a hash of column {split.column}"
    ways = {"hash": by_hash, "random": "by place, at random"}
    how = ways.get(split.by, "in their order")
    told = f"{train} train, {val} give ranges, {test} are held out"
    return f"Rows are split {how}: {told}."


def _prepare(
    out: pathlib.Path, asked: FitOptions, folder: pathlib.Path, schema: str
) -> Stage:
    """Returns the stage that turns the table into numbers."""
    more = [
        f"{flag(name)}={getattr(asked, name)}"
        for name in OF_USERS
        if getattr(asked, name)
    ]
    more += ["--bound-held-out"] if more else []
    if asked.on_bad_row:
        more.append(f"--on-bad-row={asked.on_bad_row}")
    table = (f"--input={asked.table}", f"--schema={out}/{schema}", f"--out={folder}")
    return Stage(
        "turn the table into numbers",
        folder / _PREPARED,
        ("prepare", *table, *more),
        f"What a schema should say is said by the flags of fit, or by a copy of "
        f"{out}/schema.toml that is given as --schema.",
    )


def _check_sources(folder: pathlib.Path, sources: frozenset[str]) -> None:
    """Refuses rows of a table that has changed: its parts have other rows.

    Raises:
      InputError: a file is another one than when the folder was prepared.
    """
    record = json.loads((folder / _PREPARED).read_bytes())
    if {*record["settings"][SOURCES]} != sources:
        raise InputError(
            f"Expected the table that the fit in {folder.parent} began with; its files "
            "have changed, and a row may be in another part now. Choose another --out."
        )


def _check_classes(folder: pathlib.Path, schema: Any) -> None:
    """Refuses rows for training that are all of one class.

    Raises:
      InputError: all rows are of one class, and no model would learn anything of them.
    """
    if schema.label.task == REGRESSION:
        return
    import pyarrow.parquet as pq  # after --help

    seen: set[Any] = set()
    for path in sorted(folder.glob("*.parquet")):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            labels = file.read_row_group(group, columns=["label"])["label"]
            seen.update(labels.unique().to_pylist())
            if len(seen) > 1:
                return
    if not seen:
        return
    raise InputError(
        f"Expected rows for training of two classes of {schema.label_name} or more; "
        "all are of one, of which no model learns anything."
        f"{'' if schema.split.by == RANDOM else _ORDERED}"
    )


def has_users(text: str) -> bool:
    """Whether the privacy unit of a schema is a user."""
    columns = tomllib.loads(text).get("columns", {}).values()
    return "user" in (column.get("kind") for column in columns)


def published(run: pathlib.Path, asked: FitOptions) -> dict[str, Any]:
    """Returns the run's metrics and its privacy, under "metrics" and "privacy".

    Args:
      run: Folder of the run.
      asked: Options of the fit.

    Raises:
      InputError: a file is missing or damaged.
    """
    from trainer.core.run.run_record import read_run
    from trainer.report.run_files import METRICS_NAME, read_metrics
    from trainer.run import privacy

    record, manifest = read_run(run)
    large = asked.allow_large_delta
    _, said = privacy.stated(run, record, manifest, allow_large_delta=large)
    path = run / METRICS_NAME
    metrics = read_metrics(path) if path.exists() else {}
    return {"metrics": metrics, "privacy": said}


def together(out: pathlib.Path, read: Mapping[str, Any], asked: FitOptions) -> str:
    """Returns the claim of all that was released; empty if it is the run's alone.

    Args:
      out: Folder of the fit.
      read: What `published` returned.
      asked: Options of the fit.
    """
    privacy, names = read["privacy"], ["model"]
    if "evaluation" in read["metrics"]:
        names.append("metrics")
    if (out / RANGES).exists():
        names.append("ranges")
    if len(names) == 1 or not privacy.get("is_guarantee"):
        return ""
    *first, last = names
    what = f"{', '.join(first)} and {last}".capitalize()
    if asked.of_runs != 1:
        count = f"{asked.of_runs:,}"
        what += f" of at most {count} such fits of this table, by one plan and split,"
    epsilon = upper_text(max(privacy["epsilon"], asked.epsilon))
    unit, uses = "row, which is", ["it trains", "is evaluated", "gives ranges"]
    if has_users((out / "schema.toml").read_text(encoding="utf-8")):
        unit, uses = (
            "user, whose rows are", ["they train", "are evaluated", "give ranges"]
        )  # fmt: skip
    of_what = dict(zip(("model", "metrics", "ranges"), uses, strict=True))
    *first_uses, last_use = (of_what[name] for name in names)
    return (
        f"{what} together are ({epsilon}, {privacy['delta']!r})-differentially private "
        f"for one {unit} in one part of the table: {', '.join(first_uses)} or "
        f"{last_use}."
    )


def _plan(sizes: _Sizes, asked: FitOptions) -> tuple[str, ...]:
    """Returns the arguments that compute the noise, for users as `train` does it."""
    count = asked.max_examples_per_user
    unit = () if count is None else (
        f"--max-examples-per-user={count}", f"--relation={ADD_OR_REMOVE_ONE}"
    )  # fmt: skip
    return (
        "plan", f"--num-examples={sizes.num_rows}", *sizes.sampling, *sizes.target,
        *sizes.together, *unit, f"--sampler={TRUNCATED_POISSON}", *sizes.banded,
    )  # fmt: skip


def _ranges(
    out: pathlib.Path, sizes: _Sizes, first: pathlib.Path, columns: int
) -> Stage:
    """Returns the stage that finds ranges, or none if too few rows are left for it."""
    from trainer.releases.table_statistics import least_rows  # after --help

    title, last = "find ranges with differential privacy", out / RANGES
    if last.exists() or first.name == "data":
        return Stage(title)
    schema = _schema(out)
    least = least_rows(
        schema, sizes.epsilon, sizes.delta, sizes.most, of_runs=sizes.of_runs
    )
    found = _held_out_rows(first, "val", schema, sizes)
    if found < least:
        print(
            f"\nno ranges: {found} rows of the part `val` are fewer than the {least} "
            f"that {columns} columns need. Give those that you know without the rows "
            "(--range age:0:120).",
            file=sys.stderr,
        )
        return Stage(title)
    given = (
        "statistics", f"--input={first}/val", f"--schema={out}/schema.toml",
        f"--out={last}", *sizes.target, *sizes.together,
    )  # fmt: skip
    return Stage(title, last, given)


def _evaluate(out: pathlib.Path, more: Sequence[str], is_evaluated: bool) -> Stage:
    title = "evaluate with differential privacy"
    if not is_evaluated:
        return Stage(title)
    given = (
        "evaluate", f"{out}/run", f"--batches={out}/batches",
        f"--input={out}/data/test", *more,
    )  # fmt: skip
    return Stage(title, out / "run" / "metrics.json", given)


def _is_evaluated(
    out: pathlib.Path, prepared: pathlib.Path, asked: FitOptions, sizes: _Sizes
) -> bool:
    """Returns whether held-out rows are evaluated with noise.

    Args:
      out: Folder of all results.
      prepared: Folder of the prepared table.
      asked: Options of the command.
      sizes: Sizes, and the privacy of the metrics.
    """
    from accounting.core.pld.dominating_pairs import gaussian_noise  # after --help
    from trainer.model.metrics import OTHER
    from trainer.releases.evaluate import kept_rows, least_rows

    words = shlex.split(asked.train)
    if any(word.partition("=")[0] == "--eval" for word in words):
        return False
    schema = _schema(out)
    task = OTHER if schema.label.task == REGRESSION else schema.label.task
    rows = kept_rows(task, schema.label.num_classes, most=sizes.most)
    noise = gaussian_noise(sizes.epsilon, sizes.delta) * math.sqrt(sizes.of_runs)
    least = least_rows(rows, noise)
    found = _held_out_rows(prepared, "test", schema, sizes)
    if found >= least:
        return True
    print(
        f"\nno evaluation: {found} held-out rows are fewer than the {least} of which "
        "noise leaves something.",
        file=sys.stderr,
    )
    return False


def _columns(out: pathlib.Path) -> int:
    """Returns the number of columns that get a range."""
    from trainer.releases.table_statistics import without_range  # after --help

    return len(without_range(_schema(out)))


def _held_out_rows(folder: pathlib.Path, part: str, schema: Any, sizes: _Sizes) -> int:
    """Returns how many rows a held-out part has, or might have if users are bounded.

    Args:
      folder: Folder of the prepared table.
      part: Name of the part.
      schema: Schema of the table.
      sizes: Sizes, with the bound on users.
    """
    if sizes.most is None or schema.split.by == "time":
        return _num_rows(folder, part)
    shares = dict(zip(("train", "val", "test"), schema.split.shares, strict=True))
    return int(sizes.num_rows * shares[part] // max(1, shares["train"]))


def _schema(out: pathlib.Path) -> Any:
    from pipelines.tables.schema import Schema  # after --help

    return Schema.read(out / "schema.toml")


def _num_rows(folder: pathlib.Path, part: str) -> int:
    """Returns the number of rows of a part of the prepared table, which is public."""
    import pyarrow.parquet as pq  # after --help

    from pipelines.inputs.parquet_blocks import list_blocks

    files = [pq.read_metadata(path) for path in (folder / part).glob("*.parquet")]
    if not any(file.num_rows for file in files):
        return 0
    return list_blocks(str(folder / part)).num_examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Sizes that follow from the number of training rows, and flags of them.

    ``num_rows`` is the public bound on them where users have ``most`` rows at most.
    ``of_runs`` such fits have ``epsilon`` and ``delta`` together.
    """

    num_rows: int
    most: int | None
    epsilon: float
    delta: float
    batch: int
    epochs: int
    allowance: tuple[str, ...]
    of_runs: int
    bands: int

    @classmethod
    def of(cls, folder: pathlib.Path, asked: FitOptions) -> _Sizes:
        """Returns the sizes for a prepared table.

        Args:
          folder: Folder of its parts.
          asked: Options of the command.
        """
        assert asked.epsilon is not None
        num_rows = _num_rows(folder, "train")
        batch, epochs = sizes(num_rows)
        size, rounds = asked.batch_size or batch, asked.epochs or epochs
        delta, bands = asked.delta or default_delta(num_rows), asked.bands or 1
        if asked.bands is None and _permits_bands(asked):
            bands = _best_bands(
                num_rows, size, rounds, asked.epsilon, delta, asked.of_runs
            )
        return cls(
            num_rows=num_rows,
            most=asked.max_examples_per_user,
            epsilon=asked.epsilon,
            delta=delta,
            batch=size,
            epochs=rounds,
            allowance=delta_options(None, asked.allow_large_delta),
            of_runs=asked.of_runs,
            bands=bands,
        )

    @property
    def banded(self) -> tuple[str, ...]:
        """The flag of the bands; none for independent noise."""
        return () if self.bands == 1 else (f"--bands={self.bands}",)

    @property
    def sampling(self) -> tuple[str, ...]:
        """Flags of the batches."""
        return f"--batch-size={self.batch}", f"--epochs={self.epochs}"

    @property
    def target(self) -> tuple[str, ...]:
        """Flags of epsilon and delta."""
        return (
            f"--epsilon={self.epsilon!r}", f"--delta={self.delta!r}", *self.allowance
        )  # fmt: skip

    @property
    def together(self) -> tuple[str, ...]:
        """Flags of the number of fits that have them together."""
        return () if self.of_runs == 1 else (f"--of-runs={self.of_runs}",)


def sizes(num_rows: int) -> tuple[int, int]:
    """Returns batch size and epochs for a number of training rows.

    The batch is the power of two nearest to twice the root of the rows, the epochs make
    500 steps of it, at most 8 epochs.

    Args:
      num_rows: Number of training rows, at least 1.

    Example:
      >>> sizes(16_000), sizes(200_000), sizes(46_000_000)
      ((256, 8), (1024, 3), (16384, 1))
    """
    batch = 2 ** max(0, round(math.log2(2 * math.sqrt(num_rows))))
    epochs = round(_STEPS * batch / num_rows)
    return min(batch, num_rows), min(_MOST_EPOCHS, max(1, epochs))


def default_delta(num_rows: int) -> float:
    """Returns the largest power of ten that is at most a tenth of ``1 / num_rows``.

    Args:
      num_rows: Number of training rows, at least 1.

    Example:
      >>> default_delta(16_000), default_delta(200_000)
      (1e-06, 1e-07)
    """
    return float(f"1e-{math.ceil(math.log10(10 * num_rows) - 1e-9)}")


def flag(name: str) -> str:
    """Returns the flag of an option."""
    return f"--{name.replace('_', '-')}"
