"""One run: its steps with their noise, and its record.

    session.open(held)
    session.use(step, optimizer=..., model=...)
    with session.steps() as steps:
        for noise, parts in steps:
            session.execute(noise, parts)
    session.write_record(complete=True)

Formal guarantees:
  - ``steps`` yields every remaining step of the plan, once and in order, or raises; so
    do several calls of it, one within the other.
  - Each call of ``steps`` draws a secret of its own.  The noise of a step is a function
    of it and of the step, so that a step that is taken again has new noise (condition
    C1 of ``checkpoints``).  The secret is never written.  With several workers the
    chief sends it to the others.
  - A copy of the process (a fork) takes no step.
  - No noise is drawn before ``take_batches`` gave the run its batches.
  - The seeds of its rows are derived from the secret, the step, its physical batch and
    the position of the row in it.
  - A step counts as executed once the weights include it; the record counts those of
    the last commit.
  - Each physical batch of a step belongs to one worker.  An error of one worker in a
    step is an error of all.
  - Only the chief writes, and no other process writes the folder at the same time.
  - Steps compute in float32, whatever the process was told (see ``arithmetic``).
  - No error of a step quotes an example.
  - The batches are those of the manifest and of the record of the run, byte for byte,
    also if the folder was replaced since that was read; in file order, without shuffle,
    repeat or dropped remainder.  They are exactly those of ``StoredBatches.batches``,
    which checks digests, steps and parts; none is yielded before the digest of its
    record is compared with the checksum.

Public: the record.  Sensitive: secrets, noise and batches.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pathlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from accounting.core.validation import InputError
from pipelines.core.batches.batch_format import PhysicalBatch
from pipelines.core.batches.manifest import Manifest, digest_of_seal
from pipelines.core.batches.reader import ALL, CERTIFICATE_NAME, Share, StoredBatches
from pipelines.core.files.local_files import write_atomically
from pipelines.core.keys import KEY_BYTES
from trainer.core import claim_names
from trainer.core.run import arithmetic, run_record
from trainer.core.run.redact_errors import InterruptedRunError, redact_errors
from trainer.core.run.run_record import RunRecord
from trainer.core.step.bounded_sum import BoundedSum, StepSum
from trainer.core.step.dp_step import Step
from trainer.core.step.noise import SEEDS, DrawStep, LaterNoise, row_seeds
from trainer.core.step.workers import Alone, TakenStep, Workers
from trainer.core.tf_compat import tf

if TYPE_CHECKING:
    from trainer.settings.train_settings import TrainSettings

#: A physical batch: see `read_elements`.
Element = dict[str, Any]
#: The random draws of a step, and its physical batches.  Sensitive.
StepInputs = tuple[list[np.ndarray], Iterator[Element]]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Session:
    """One run of one worker.

    Attributes:
      settings: Training settings.
      manifest: Manifest of the batches.
      noise_multiplier: Noise standard deviation over the clip norm; None without noise.
      batches: The batches, here or in a store.
      run: Folder of the run.
      take_batches: Called with the random id of the run; raises if the batches are
        another run's.
      batches_used_before: Whether another run may have used the batches.
      num_steps_executed: Number of steps in the weights.
      num_steps_committed: Number of steps in the last commit.
      num_commits: Number of commits.
      workers: The workers that share each step.
      relied_on: Claims of the executed steps.
      is_within_step: Whether a step was begun that is not executed.
      fits: For every call of ``fit``, its first step, weights and metrics, as JSON.
      run_id: Random id of an open run; empty before.  Sensitive.
      records_id: Public name of the batches of an open run; see ``RunRecord``.
    """

    settings: TrainSettings
    manifest: Manifest
    noise_multiplier: float | None
    batches: StoredBatches
    run: pathlib.Path
    take_batches: Callable[[str], None]
    batches_used_before: bool
    num_steps_executed: int = 0
    num_steps_committed: int = 0
    num_commits: int = 0
    workers: Workers = dataclasses.field(default_factory=Alone)
    relied_on: tuple[str, ...] = ()
    is_within_step: bool = False
    fits: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    run_id: str = dataclasses.field(default="", init=False)
    records_id: str = dataclasses.field(default="", init=False)
    _secret: bytes = dataclasses.field(init=False)
    _step: Step = dataclasses.field(init=False)
    _optimizer: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)
    _model: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)
    _seeds: tuple[int, ...] | None = dataclasses.field(default=None, init=False)
    _key_name: str = dataclasses.field(default="", init=False)
    _process: int = dataclasses.field(default_factory=os.getpid, init=False)

    def __post_init__(self) -> None:
        arithmetic.variables()  # refused before any work

    # -- identity ------------------------------------------------------------------

    def open(
        self,
        held: contextlib.ExitStack,
        *,
        resumes: bool = False,
        agreed: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the folder of the run, or cleans that of a resumed run.

        Args:
          held: Keeps other processes out of the folder until it is closed; then the
            folder may be opened again.
          resumes: Whether the run is resumed.
          agreed: What must be the same at all workers, as JSON.

        Raises:
          InputError: another process writes the folder, or a worker differs.
        """
        found = self.workers.together(lambda: self._open(held, resumes))
        self.run_id = self.workers.chiefs(found.encode()).decode()
        self.records_id = self.batches.records_id()
        self._key_name = self.batches.key_name()
        self.workers.compare({"batches": self.records_id, **(agreed or {})})

    def _open(self, held: contextlib.ExitStack, resumes: bool) -> str:
        if not self.workers.is_chief:
            return ""
        self.check_folder()
        resumes = resumes or self.is_open
        held.enter_context(run_record.open_run(self.run, resumes=resumes))
        return run_record.read_or_create_run_id(self.run)

    @property
    def is_open(self) -> bool:
        """Whether the run has its folder."""
        return bool(self.run_id)

    # -- steps ---------------------------------------------------------------------

    def use(
        self,
        step: Step,
        *,
        optimizer: dict[str, Any],
        model: dict[str, Any],
        seeds: tuple[int, ...] | None = None,
    ) -> None:
        """Sets the step that is executed from now on.

        Args:
          step: The step.
          optimizer: Name and settings of the step's optimizer, for the record.
          model: Name and sizes of the step's model, for the record.
          seeds: Shape of an example's seeds; None for no seeds.

        Raises:
          InputError: the step is of another plan, noise or clip than the run.
        """
        self._check_step(step.bounded)
        self._step, self._optimizer, self._model = step, optimizer, model
        self._seeds = seeds

    def traced(self) -> Any:
        """Returns the ``ConcreteFunction`` of a step of one batch, which steps use."""
        spec = element_spec(self.manifest, self._seeds)
        return self._step.traced(spec["columns"], spec["weight"])

    def _check_step(self, bounded: StepSum) -> None:
        is_private = self.noise_multiplier is not None
        for name, found, wanted in (
            ("is_bounded", isinstance(bounded, BoundedSum), is_private),
            ("plan", bounded.plan, self.manifest.plan),
            ("noise_multiplier", bounded.noise_multiplier, self.noise_multiplier),
            ("l2_norm_clip", bounded.l2_norm_clip, self.settings.l2_norm_clip),
        ):
            if found != wanted:
                raise InputError(
                    f"Expected {name}={found!r} of the step to be that of the run, "
                    f"{wanted!r}. Make the sum of the step by registry.step_sum."
                )

    @property
    def num_steps(self) -> int:
        """Number of steps in the plan."""
        return self.manifest.plan.num_steps

    @contextlib.contextmanager
    def steps(
        self, *, end: int | None = None, draw: DrawStep | None = None
    ) -> Iterator[Iterator[StepInputs]]:
        """Provides an iterator over the remaining steps, each for ``execute``.

        Args:
          end: Number of steps after which the iterator ends; the whole plan if None.
          draw: Makes further draws for a step, in addition to its noise.

        Raises:
          InputError: another run has the batches.
        """
        assert self.is_open
        chief = self.workers.is_chief
        self.workers.together(lambda: self.take_batches(self.run_id) if chief else None)
        self._secret = self.workers.chiefs(new_secret() if chief else b"")
        arithmetic.settle()
        end = self.num_steps if end is None else end
        remaining = range(self.num_steps_executed, end)
        with self._step.noise(self._secret, remaining, draw) as noise:
            yield self._with_batches(iter(noise), remaining)

    def _with_batches(
        self, noise: Iterator[list[np.ndarray]], remaining: range
    ) -> Iterator[StepInputs]:
        share = Share(self.workers.rank, self.workers.count)
        batches = read_elements(
            self.batches,
            self.manifest,
            # Not the first step of now: others may have taken steps since.
            first_step=remaining.start,
            share=share,
            records=self.records_id,
        )
        steps = InOrder(_readable(batches), is_shared=share.count > 1)
        for step in remaining:
            self._begin(step)
            # parts() checks the step before it is executed.
            yield next(noise), steps.parts(step)
        if remaining.stop == self.num_steps:
            steps.finish()

    def _begin(self, step: int) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"Expected step {step} in process {self._process}, which began the "
                "run: a copy (fork) of it could use noise twice. Call fit there."
            )
        if self.is_within_step or step != self.num_steps_executed:
            raise InputError(
                f"Expected step {step} to follow the last one; there were "
                f"{self.num_steps_executed}, and the noise of a step may not be used "
                "twice. Call fit when no other fit of the run is at work."
            )
        self.is_within_step = True

    def execute(
        self,
        noise: list[np.ndarray],
        parts: Iterable[Element],
        *,
        stop: int | None = None,
    ) -> int | None:
        """Executes a step; returns the stop signal that any worker received, or None.

        Args:
          noise: An array for each variable of the step.
          parts: The physical batches of the step.
          stop: Number of the stop signal that this worker received; None for none.

        Raises:
          InputError: the workers together do not have all parts of the step.
        """
        self._step.begin(noise, self.later_noise())
        numbers: list[int] = []

        def add() -> None:
            for batch in parts:
                self._add(batch)
                numbers.append(int(batch["part"]))

        failure = _failure_of(add)

        def settle(compute: Callable[[], None]) -> int | None:
            taken = TakenStep(
                step=self.num_steps_executed,
                parts=numbers,
                parts_per_step=self.manifest.parts_per_step,
                signal_number=stop,
                failure=failure or _failure_of(redact_errors(compute)),
            )
            return self.workers.settle_step(taken)

        stop_of_all: int | None = redact_errors(self._step.finish)(settle)
        self.relied_on = self.relies_on  # a later step may be another one
        self.num_steps_executed += 1
        self.is_within_step = False
        return stop_of_all

    @redact_errors
    def _add(self, batch: Element) -> None:
        if self._seeds is not None:
            batch = {
                **batch,
                "columns": {**batch["columns"], SEEDS: self._drawn(batch)},
            }
        self._step.add(batch["columns"], batch["weight"])

    def _drawn(self, batch: Element) -> np.ndarray:
        """Returns the seeds of the rows of a physical batch.  Sensitive."""
        assert self._seeds is not None
        shape = (self.manifest.physical_batch_size, *self._seeds)
        step, part = int(batch["step"]), int(batch["part"])
        return row_seeds(self._secret, step, part, shape)

    def later_noise(self) -> LaterNoise:
        """Returns the later noise of lazy tables.  Sensitive."""
        return self._step.later_noise(self._secret, self.num_steps_executed)

    def go_back(self, num_steps_executed: int) -> None:
        """Counts the steps of a restored state; later ones are taken again.

        Args:
          num_steps_executed: Number of steps of the restored state.
        """
        self.num_steps_executed = num_steps_executed
        self.is_within_step = False

    # -- record --------------------------------------------------------------------

    @property
    def relies_on(self) -> tuple[str, ...]:
        """Names of the claims by which the run is private."""
        return claim_names.check([*self.relied_on, *self._step.relies_on])

    def record(self, *, complete: bool) -> RunRecord:
        """Returns the record of the committed steps; ``complete`` if these are all."""
        settings, manifest = self.settings, self.manifest
        bounded = self._step.bounded
        return RunRecord(
            method=settings.method,
            method_settings=dict(settings.method_settings),
            num_steps_executed=self.num_steps_committed,
            num_commits=self.num_commits,
            complete=complete,
            noise_multiplier=bounded.noise_multiplier,
            l2_norm_clip=bounded.l2_norm_clip,
            clip_quantile=bounded.clip_quantile,
            expected_batch_size=bounded.divisor,
            relies_on=[*self.relies_on],
            target_delta=settings.target_delta,
            manifest_fingerprint=manifest.fingerprint,
            batches_id=manifest.batches_id,
            records_id=self.records_id,
            key_name=self._key_name,
            optimizer=self._optimizer,
            model={**self._model, "fits": [*self.fits]} if self.fits else self._model,
            versions=run_record.versions(),
            selection=settings.selection_described,
            of_runs=settings.of_runs,
            batches_used_before=self.batches_used_before,
        )

    def check_folder(self) -> None:
        """Refuses a folder that was removed, and in which another run has begun."""
        if self.run_id and run_record.read_or_create_run_id(self.run) != self.run_id:
            raise InputError(
                f"Expected {self.run} to hold this run; it was removed, and another "
                "one has begun there. Begin again in another folder."
            )

    def write_record(self, *, complete: bool) -> None:
        """Writes the record, and copies of manifest and certificate, to the folder."""
        if not self.workers.is_chief:
            return
        self.check_folder()
        certificate = self.batches.certificate()
        if certificate is not None:
            write_atomically(self.run / CERTIFICATE_NAME, certificate)
        run_record.write_run(self.run, self.record(complete=complete), self.manifest)


def new_secret() -> bytes:
    """Returns the secret of an attempt, for its noise.  Sensitive."""
    return secrets.token_bytes(KEY_BYTES)


def _failure_of(work: Callable[[], None]) -> InputError | None:
    """Returns the error that a step's values raised, with which all workers end."""
    try:
        work()
    except InterruptedRunError:
        raise  # of this worker's machine: the others lose it
    except InputError as error:
        return error
    return None


class InOrder:
    """The physical batches of a worker, step by step; see `Workers.settle_step`.

    Args:
      batches: Batches of consecutive steps.
      is_shared: Whether all parts of a step may be those of other workers.
    """

    def __init__(self, batches: Iterable[Element], *, is_shared: bool) -> None:
        self._steps = itertools.groupby(batches, lambda batch: int(batch["step"]))
        self._is_shared = is_shared
        self._next = next(self._steps, None)

    def parts(self, step: int) -> Iterator[Element]:
        """Returns the parts of the next step; none if all belong to other workers.

        Raises:
          InputError: the batches repeat a step, skip one, or end before it.
        """
        found = step + 1 if self._next is None else self._next[0]
        if self._is_shared and found > step:
            return iter(())
        if found != step or self._next is None:
            what = "end" if self._next is None else f"go on with step {found}"
            raise InputError(
                f"Expected step {step} of the plan next; the batches {what}. Make them "
                "again, or restore them."
            )
        return self._entered(self._next[1])

    def _entered(self, parts: Iterator[Element]) -> Iterator[Element]:
        yield from parts
        self._next = next(self._steps, None)

    def finish(self) -> None:
        """Refuses batches that go on after the last step of the plan."""
        if self._next is not None:
            raise InputError(
                "Expected the batches to end with the plan; they go on with step "
                f"{self._next[0]}. Make them again, or restore them."
            )


def _readable(source: Iterable[Element]) -> Iterator[Element]:
    """Yields the batches; marks errors of their files, which tell nothing of values."""
    try:
        yield from source
    except InputError as error:
        raise InterruptedRunError(str(error)) from None


# -- batches -----------------------------------------------------------------------

#: Number of physical batches that are decoded ahead of training.
_PREFETCH = 4


def element_spec(
    manifest: Manifest, seeds: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Returns the ``tf.TensorSpec`` structure of one physical batch.

    Args:
      manifest: Manifest of the batches.
      seeds: Shape of an example's seeds; None for no seeds.
    """
    size = manifest.physical_batch_size
    columns = {
        column.name: tf.TensorSpec((size, *column.shape), column.dtype)
        for column in manifest.columns
    }
    if seeds is not None:
        columns[SEEDS] = tf.TensorSpec((size, *seeds), tf.uint32)
    return {
        "columns": columns,
        "weight": tf.TensorSpec((size,), tf.float32),
        "step": tf.TensorSpec((), tf.int64),
        "part": tf.TensorSpec((), tf.int64),
    }  # fmt: skip


def read_elements(
    stored: StoredBatches,
    manifest: Manifest,
    *,
    first_step: int = 0,
    share: Share = ALL,
    records: str = "",
) -> Iterator[Element]:
    """Yields batches as dicts of tensors.

    A batch has ``columns`` (name -> tensor), ``weight`` (1 real, 0 padding), and the
    integers ``step`` and ``part``.  A step is one or more consecutive elements.

    Args:
      stored: The batches.
      manifest: Manifest of the batches.
      first_step: Step to start at.
      share: The parts of one of several workers; a step may then have no element.
      records: ``records_id`` of the batches of the run; empty without a run.

    Raises:
      InputError: as for ``StoredBatches.batches``, or the folder holds other batches.
    """
    found, checksums = stored.manifest(), stored.checksums()
    is_other = found.batches_id != manifest.batches_id
    if is_other or records not in ("", digest_of_seal(checksums.seal.hex())):
        raise InputError(
            f"Expected {stored.place} to hold the batches that the run was checked "
            "with; there are others now. Restore them, or begin a new run in another "
            "folder."
        )
    # The manifest and checksums that were compared, even if the files change now.
    batches = stored.batches(found, checksums, first_step=first_step, share=share)
    # tf.data would copy each record to TensorFlow and parse it again, which costs more
    # than all of this.
    yield from _ahead(map(_element, batches))


def _element(batch: PhysicalBatch) -> Element:
    return {
        "columns": {name: tf.constant(value) for name, value in batch.columns.items()},
        "weight": tf.constant(batch.weight),
        "step": batch.step,
        "part": batch.part,
    }


def _ahead(elements: Iterator[Element]) -> Iterator[Element]:
    """Yields the elements, prefetched by a thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = collections.deque(
            pool.submit(next, elements, None) for _ in range(_PREFETCH)
        )
        while (element := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, elements, None))
            yield element
