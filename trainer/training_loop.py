"""The one loop of a run: steps, commits, and what is published after each commit.

    training = Training(...)
    training.use(model, trained, optimizer=..., settings=...)
    training.open(held, resumes=...)
    with training.attempt():
        training.take_steps(end)
        training.commit()

``PrivateModel.fit`` calls it, and so does ``dpsgd train`` by ``fit``.  It keeps the
conditions of the theorem in ``trainer.core.run.checkpoints``:

  - C2: a checkpoint holds every variable that the traced step uses, with the weights,
    the optimizer, the averages and the curve; a step with state elsewhere is refused.
    Rows of lazy tables are completed before a commit, so that nothing is pending.
  - C3: ``attempt`` ends the run for good at any error but those of ``_INTERRUPTIONS``.
  - C5: the record, kept iterates and the copy in a store follow the commit of their
    state; so does everything that ``fit`` calls after ``take_steps`` or ``commit``.
    A folder whose record is ahead of its last checkpoint is refused.

When an attempt ends early in a process that lives on, its variables are set back to the
last committed state, before any other code sees them.

Public: steps, commits, messages.  Sensitive: the rest, until it is committed.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from pipelines.batches import first_use
from pipelines.batches.folder import stored
from pipelines.core.batches.manifest import Manifest
from pipelines.core.threads import machine_memory
from pipelines.files import storage
from pipelines.files.processes import StoppedError, on_signals
from pipelines.files.storage import StrPath, read_json
from trainer.claims import launch, lazy_noise, worker_group
from trainer.claims.lazy_noise import LazyNoise
from trainer.claims.worker_group import AgreedStopError
from trainer.core.run.checkpoints import OR_ANEW, Checkpoints, Files, State
from trainer.core.run.redact_errors import InterruptedRunError
from trainer.core.run.run_record import RECORD_NAME, RunRecord, read_run_id, versions
from trainer.core.run.session import Session, StepInputs, read_elements
from trainer.core.step.dp_step import Step
from trainer.core.step.pure_graph import check_state, variables_read
from trainer.core.step.workers import Workers
from trainer.core.tf_compat import raw_variable, tf
from trainer.model import weights
from trainer.model.trainable_model import TrainableModel
from trainer.model.user_code import one_line_errors
from trainer.report.progress import Reporter
from trainer.run import hooks
from trainer.run.averages import BestIterate, TrainingAverages, without_held_out
from trainer.run.iterates import Iterates
from trainer.run.stored_run import StoredRun
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.train_settings import TrainSettings

#: Names of Keras's variables that callbacks set.
_RATES = ("learning_rate",)

#: Groups of variables that are the same whatever is compiled.
_OF_EVERY_FIT = ("weight", "average")

#: Seconds between checkpoints if no number of steps is given.
_CHECKPOINT_SECONDS = 60.0

#: Errors after which a run may go on: none depends on values that are not committed.
_INTERRUPTIONS = (KeyboardInterrupt, MemoryError, OSError, InterruptedRunError)


def _files() -> Files:
    return Files(
        create=lambda path, data: storage.create(path, data, mode=0o600),
        read=storage.read_bytes,
        names=storage.names,
        make_folder=storage.make_folder,
        remove=storage.delete,
    )


class Training:
    """One run of one worker.

    Args:
      settings: Settings of the run.
      manifest: Manifest of the batches.
      noise_multiplier: Noise multiplier of the run; None without noise.
      batches: Folder of the batches, here or in a store.
      run: Folder of the run, on this machine.
      workers: The workers that share each step.
      store: Folder in a store that keeps the run; None for a run that stays here.
      checkpoint_every: Steps between checkpoints; by time if None.
      batches_used_before: Whether another run may have used the batches.
      keeps_best: Whether the best iterate, on a tenth of the training rows, is kept.
      reporter: Receives public progress.
      held_out: Digest of the held-out examples of the points, at the chief.

    Attributes:
      session: Steps and record.
      averages: Averages of the weights.
      best: The best iterate so far; None unless it is kept.
      iterates: The kept iterates of the folder.
      points: Metrics of held-out examples so far: dicts with ``step``.
      histories: Keras's history of each call of ``fit``, of epochs that were shown.
      shown: Number of steps of the last state of which all was published.
      rates: Learning rates before the epoch that is not shown yet; None between epochs.
      is_current: Whether this process has all of the last commit.
    """

    def __init__(
        self,
        *,
        settings: TrainSettings,
        manifest: Manifest,
        noise_multiplier: float | None,
        batches: StrPath,
        run: pathlib.Path,
        workers: Workers,
        reporter: Reporter,
        store: str | None = None,
        checkpoint_every: int | None = None,
        batches_used_before: bool = False,
        keeps_best: bool = False,
        held_out: str = "",
    ) -> None:
        self.session = Session(
            settings=settings,
            manifest=manifest,
            noise_multiplier=noise_multiplier,
            batches=stored(batches),
            run=run,
            take_batches=self._take_batches,
            batches_used_before=batches_used_before,
            workers=workers,
        )
        self._batches, self._store = batches, store
        self._every, self._workers = checkpoint_every, workers
        self._reporter, self._keeps_best = reporter, keeps_best
        self._held_out = held_out
        self._checkpoints = Checkpoints(str(store or run), _files())
        self._steps: Iterator[StepInputs] = iter(())
        self._received: list[int] = []
        self._saved_at = time.monotonic()
        self.best: BestIterate | None = None
        self.points: list[dict[str, Any]] = []
        self.histories: dict[str, dict[str, Any]] = {}
        self.shown = -1
        self.rates: list[float] | None = None
        self.is_current = False
        self._has_ended, self._is_at_work = False, False
        self._identity: dict[str, Any] = {}

    def _take_batches(self, run_id: str) -> None:
        session = self.session
        if session.settings.method == NON_PRIVATE:
            return
        folder, shared = self._store or session.run, session.batches_used_before
        if note := first_use.take(self._batches, run_id, folder, shared=shared):
            self._reporter.say(note)

    # -- the step ------------------------------------------------------------------

    def use(
        self,
        model: TrainableModel,
        trained: TrainableModel,
        *,
        settings: TrainSettings,
        optimizer: Any,
        description: Mapping[str, Any],
    ) -> None:
        """Sets the step that is executed from now on.

        Args:
          model: The model of one view, checked.
          trained: The model that a step trains: see ``models.make_trained``.
          settings: Settings of the run, with the name of the optimizer.
          optimizer: Keras optimizer.
          description: Name and settings of the optimizer, for the record.

        Raises:
          InputError: the method, or a checkpoint, does not support one of them.
        """
        session, plan = self.session, self.session.manifest.plan
        session.settings = settings
        self._model, self._hooks = model, hooks.hooks_of(settings.method)
        if self._hooks.optimizer is not None:
            optimizer = self._hooks.optimizer(settings, optimizer, model.optimized)
        self._optimizer = optimizer
        self._bounded = hooks.step_sum(
            trained, settings, plan, session.noise_multiplier
        )
        self._say_memory_of_bands(model)
        self._choose_lazy_tables(trained)
        # Those of now: a user may freeze layers later, which a step does not heed.
        self._weights = [*model.variables]
        if not hasattr(self, "averages"):
            self.averages = TrainingAverages(self._weights, settings)
        if self._keeps_best and self.best is None:
            self.best = self._find_best()
        self.iterates = Iterates(
            run=session.run, steps=settings.kept_steps(plan.num_steps)
        )
        session.use(
            Step(
                model.optimized,
                self._bounded,
                optimizer,
                lazy=self._lazy,
                workers=self._workers,
            ),
            optimizer=dict(description),
            model=trained.description,
            seeds=trained.seeds,
        )
        with one_line_errors("the step"):
            graph = session.traced().graph
        check_state(graph)
        self._variables = self._named_variables(variables_read(graph))

    def _choose_lazy_tables(self, trained: TrainableModel) -> None:
        session = self.session
        self._lazy: LazyNoise | None = None
        #: Steps between moments at which a commit costs a small part of the steps.
        self._cheap_every = 1
        chosen = lazy_noise.choose(
            trained, self._optimizer, session.settings, manifest=session.manifest
        )
        if chosen is not None:
            reads, self._cheap_every = chosen
            self._lazy = LazyNoise(reads, bounded=self._bounded, workers=self._workers)
            self._reporter.say(
                f"embedding noise: lazy for {len(reads.tables)} tables; all rows are "
                "completed before anything but a step reads them"
            )

    def _say_memory_of_bands(self, model: TrainableModel) -> None:
        """Says what the noise of earlier steps takes, or refuses it.

        Raises:
          InputError: the noise takes more memory than this machine has.
        """
        bands = len(self._bounded.bands)
        if bands == 1:
            return
        size = sum(variable.shape.num_elements() for variable in model.variables)
        needed = 8 * size * (bands - 1) // self._workers.count
        total = machine_memory()
        if needed > total:
            raise InputError(
                f"Expected bands={bands} of the batches to leave room in memory: the "
                f"noise of {bands - 1} steps takes {needed / 2**30:,.1f} GiB, and this "
                f"machine has {total / 2**30:,.1f}. Make batches with fewer: "
                "--bands 1 of `dpsgd batches` and `fit`, or bands=1 of make_private."
            )
        self._reporter.say(
            f"banded noise: {bands} bands, whose noise takes "
            f"{needed / 2**20:,.1f} MiB of memory"
        )

    def _find_best(self) -> BestIterate:
        manifest, model = self.session.manifest, self._model  # one view, no dropout
        return BestIterate(
            self._model.variables,
            lambda columns: model.losses(model.columns_of(columns)),
            read_elements(self.session.batches, manifest),
        )

    def _named_variables(self, used: Any) -> dict[str, Any]:
        """Returns all variables that later steps or results depend on, by name."""
        of_tables = [] if self._lazy is None else self._lazy.buffers
        of_method = [] if self._hooks.optimizer is None else self._optimizer.buffers
        buffers = {one.ref() for one in (*of_tables, *of_method)}
        groups = {
            "weight": [*map(raw_variable, self._model.network.weights)],
            "optimizer": [*map(raw_variable, self._optimizer.variables)],
            "average": self.averages.variables,
            "best": [] if self.best is None else self.best.variables,
            # Keras's Nadam, for one, has state that it does not declare.
            "step": list(used),
        }
        found: dict[str, Any] = {}
        known = set(buffers)
        for group, variables in groups.items():
            new = [one for one in variables if one.ref() not in known]
            known.update(one.ref() for one in new)
            found |= {f"{group}_{place}": one for place, one in enumerate(new)}
        return found

    @property
    def adaptive_clip(self) -> Any:
        """The clip that follows a quantile of the norms; None for a fixed one."""
        return self._bounded.adaptive

    # -- commits -------------------------------------------------------------------

    def open(
        self,
        held: contextlib.ExitStack,
        *,
        resumes: bool,
        settings: Mapping[str, Any],
        fit: int,
    ) -> None:
        """Opens the folder of the run, at its last commit if there is one.

        A commit belongs to the call of ``fit`` that made it.  Code around earlier calls
        runs again, and may compile others; so they get the weights alone, and that call
        all of the commit, whatever code did in between.

        Args:
          held: Keeps other processes out of the folder until it is closed.
          resumes: Whether the folder holds a run that was begun.
          settings: What else must be as when the run began, as JSON.
          fit: Number of calls of ``fit`` before this one.

        Raises:
          InputError: another process has the folder; or a run in it cannot go on with
            these settings, batches and weights, or has ended.
        """
        session = self.session
        self._identity = self._identity or {
            "settings": json.loads(json.dumps(settings)),
            "plan": session.manifest.fingerprint,
            "noise_multiplier": session.noise_multiplier,
        }
        if self._workers.is_chief:
            session.check_folder()
        self._workers.together(self._check_weights)
        agreed = {**self._identity, "versions": versions()}
        session.open(held, resumes=resumes, agreed=agreed)
        weights.take(self._model.network, self._batches, session.run_id)
        self._identity |= {"batches": session.records_id, "--eval": self._held_out}
        self._stored = StoredRun(session.run, self._store)
        if self._workers.is_chief:
            self._stored.take()
        if self.is_current:
            self._workers.together(self._check_newest)
            return
        # The chief alone knows whether it resumes; all of them meet here.
        state = self._workers.together(lambda: self._last() if resumes else None)
        if state is not None:
            self._restore(state, is_earlier=fit + 1 < len(state.public["fits"]))
        self.share()
        self.is_current = fit + 1 >= len(session.fits)
        if resumes and session.num_commits and self.is_current:
            self._reporter.say(f"continuing after step {session.num_steps_executed}")

    def _check_newest(self) -> None:
        if self._workers.is_chief:
            self._checkpoints.check_newest()

    def _check_weights(self) -> None:
        """Refuses weights that another run of this process trained on the same rows."""
        weights.check(
            self._model.network,
            self.session.traced().graph.variables,
            self._batches,
            read_run_id(self.session.run),
        )

    def _last(self) -> State | None:
        if not self._workers.is_chief:
            return None
        state = self._checkpoints.last()
        path = self.session.run / RECORD_NAME
        if path.exists():
            found = RunRecord.from_json(read_json(path)).num_commits
            if found > self._checkpoints.number:
                raise InputError(
                    f"Expected the last checkpoint of {self.session.run} to be number "
                    f"{found}, of which its record tells; it is number "
                    f"{self._checkpoints.number}, and steps that were released would "
                    f"be taken again. Restore the folder as a whole, {OR_ANEW}"
                )
        if state is not None:
            self._checkpoints.check_may_go_on(state)
            self._check_identity(state.public["identity"])
        return state

    def _check_identity(self, recorded: Mapping[str, Any]) -> None:
        for name, now in self._identity.items():
            then = recorded[name]
            if isinstance(now, dict):
                pairs = {k: (then.get(k), now.get(k)) for k in (*now, *then)}
            else:
                pairs = {name: (then, now)}
            for key, (before, given) in pairs.items():
                if before != given:
                    raise InputError(
                        f"Expected {key}={given!r} to be {before!r}, as when the run "
                        f"in {self.session.run} began. Give the same as before, "
                        f"{OR_ANEW}"
                    )

    def share(self) -> None:
        """Sets everything to the chief's, at every worker: models begin at random."""
        if self._workers.count > 1:
            own = self._checkpoints.encoded(self._state(self.session.num_commits))
            entry, arrays = (self._workers.chiefs(part) for part in own)
            self._restore(self._checkpoints.parse(entry, arrays))

    def _restore(self, state: State, *, is_earlier: bool = False) -> None:
        """Sets all to a committed state; for an earlier ``fit`` the weights alone."""
        groups = _OF_EVERY_FIT if is_earlier else ("",)
        shapes, committed = (
            {name: tuple(one.shape) for name, one in found.items()
             if name.startswith(groups)}
            for found in (self._variables, state.arrays)
        )  # fmt: skip
        if shapes != committed:
            raise InputError(
                f"Expected the model and optimizer of the run in {self.session.run}; "
                "their weights have other numbers or shapes. Give the same as before, "
                f"{OR_ANEW}"
            )
        for name in shapes:
            self._variables[name].assign(state.arrays[name])
        if self._lazy is not None:
            self._lazy.forget()
        public, session = state.public, self.session
        session.go_back(state.step)
        session.relied_on = tuple(public["relies_on"])
        session.fits[:] = public["fits"]
        self.points[:], self.shown = public["points"], public["shown"]
        self.histories = public["histories"]
        self.rates = None if is_earlier else public["rates"]
        if self.rates is not None:
            # The epoch begins again for callbacks, which may have set its rate.
            self._set_rates(self.rates)
        session.num_commits = public["num_commits"]
        session.num_steps_committed = state.step

    def commit(self) -> None:
        """Commits the current state, and then writes the record."""
        session = self.session
        self._complete_rows()
        number = session.num_commits + 1
        if self._workers.is_chief:
            session.check_folder()
            self._stored.take()
            state = self._state(number)
            with self._stored.plain_errors():
                self._checkpoints.commit(state)
        self._saved_at, session.num_commits = time.monotonic(), number
        session.num_steps_committed = session.num_steps_executed
        if self._workers.is_chief:
            self._publish(state)

    def _complete_rows(self) -> None:
        """Adds the outstanding lazy noise; before that only a step may read weights."""
        if self._lazy is not None:
            self._lazy.flush(self.session.later_noise().of_flush)

    def _state(self, num_commits: int) -> State:
        session = self.session
        return State(
            step=session.num_steps_executed,
            arrays={name: v.numpy() for name, v in self._variables.items()},
            public={
                "identity": self._identity,
                "num_commits": num_commits,
                "relies_on": [*session.relies_on],
                "fits": session.fits,
                "points": self.points,
                "histories": self.histories,
                "shown": self.shown,
                "rates": self.rates,
            },
        )

    def _publish(self, state: State) -> None:
        """Makes public what a committed state says; also after a crash."""
        step = state.step
        names = {one.ref(): name for name, one in self._variables.items()}
        weights = [state.arrays[names[raw_variable(w).ref()]] for w in self._weights]
        if not all(np.isfinite(value).all() for value in weights):
            raise InputError(
                f"Expected finite weights after step {step}; they are not. Lower "
                "--learning-rate, or take another --optimizer or --adam-floor."
            )
        # First, so that no public file is ahead of it: see ``_last``.
        self.session.write_record(complete=False)
        if step in self.iterates.steps:
            self.iterates.keep(step, weights)
        self._stored.send(complete=False)

    def agrees(self, stop: bool) -> bool:
        """Returns the chief's decision, at every worker, which also get its rate.

        Args:
          stop: Decision of this worker; only the chief's counts.
        """
        if self._workers.count == 1:
            return stop
        mine = json.dumps([stop, *self.current_rates()]).encode()
        stop, *rates = json.loads(self._workers.chiefs(mine))
        self._set_rates(rates)
        return stop

    def current_rates(self) -> list[float]:
        """Returns the learning rates, which callbacks may set."""
        return [float(rate) for rate in self._rate_variables()]

    def _set_rates(self, values: list[float]) -> None:
        for rate, value in zip(self._rate_variables(), values, strict=True):
            rate.assign(value)

    def _rate_variables(self) -> list[Any]:
        return [one for one in self._optimizer.variables if one.name in _RATES]

    def finish(self) -> None:
        """Ends a complete run: its record says so last."""
        if not self._workers.is_chief:
            return
        self.session.write_record(complete=True)
        self._stored.send(complete=True)
        self._checkpoints.finish()

    # -- steps ---------------------------------------------------------------------

    def check_goes_on(self) -> None:
        """Refuses further steps of a run that has ended, or that takes some now.

        Raises:
          InputError: the run has ended, or takes steps now.
        """
        session = self.session
        if self._has_ended:
            raise InputError(
                f"Expected a run that may go on; an error at step "
                f"{session.num_steps_committed} has ended that in {session.run} for "
                "good: to take steps again until they suit would void its guarantee. "
                "Begin a new run, on batches of its own, in another folder."
            )
        if self._is_at_work:
            raise InputError(
                "Expected fit to end before it is called again: a step would be taken "
                "within another one. Call it after the fit that is at work."
            )

    @contextlib.contextmanager
    def attempt(self, end: int) -> Iterator[None]:
        """Prepares the steps up to ``end``; a context that fails goes back.

        Args:
          end: Number of steps of the run after which the attempt ends.

        Raises:
          InputError: another run has the batches.
        """
        session = self.session
        self._is_at_work, first = True, session.num_steps_executed
        try:
            with (
                launch.ending_together(self._workers),
                on_signals(self._receive),
                session.steps(end=end, draw=self._hooks.draw) as self._steps,
            ):
                self._reporter.start(session.num_steps, done=session.num_steps_executed)
                yield
                self._reporter.stop()
        except BaseException as error:
            # Before the first step of the attempt nothing depends on its noise.
            has_stepped = session.is_within_step or session.num_steps_executed > first
            ends = has_stepped and not isinstance(error, _INTERRUPTIONS)
            if ends:
                self._end_for_good()
            if self._workers.count == 1:
                self._go_back()
            if ends:
                self._record_the_end()
            raise
        finally:
            self._is_at_work = False
            self._received.clear()

    @property
    def _is_committed(self) -> bool:
        session = self.session
        steps = session.num_steps_executed, session.num_steps_committed
        return steps[0] == steps[1] and not session.is_within_step

    def _end_for_good(self) -> None:
        self._has_ended = True
        if self._workers.is_chief:
            self._checkpoints.end()

    def _record_the_end(self) -> None:
        self.session.fits[-1]["ended"] = True
        if self._workers.is_chief:
            with contextlib.suppress(OSError, InputError):
                self.session.write_record(complete=False)
                self._stored.send(complete=False)

    def _receive(self, number: int) -> None:
        # A second one stops immediately; workers get that of their process group twice,
        # since a launcher passes it on.
        if self._received and self._workers.count == 1:
            raise StoppedError(_STOPPED, number)
        self._received.append(number)

    def _go_back(self) -> None:
        """Sets everything to the last committed state, or refuses to go on."""
        if self._is_committed and not self.session.num_commits:
            return  # nothing was done
        try:
            state = self._checkpoints.last()
        except (OSError, InputError):
            state = None
        if state is not None:
            self._restore(state)
            return
        self._has_ended = True
        for variable in self._variables.values():  # nobody sees what was not committed
            variable.assign(tf.zeros_like(variable))

    def take_steps(
        self,
        end: int,
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """Takes steps and commits, the last of them included.

        Args:
          end: Number of steps of the run after which it ends.
          before: Called before each step.
          after: Called after each step.

        Raises:
          StoppedError: a signal arrived; the steps so far are committed.
        """
        session = self.session
        while session.num_steps_executed < end:
            before()
            drawn, parts = next(self._steps)
            noise = self._before_step(drawn)
            if self.best is not None:
                parts = map(without_held_out, parts)
            number = session.execute(
                noise, parts, stop=next(iter(self._received), None)
            )
            done = session.num_steps_executed
            if done == session.num_steps:
                next(self._steps, None)  # checks that the batches end here
            self.averages.after_step(done)
            self._reporter.advance(done)
            after()
            is_last = done == end
            if is_last:
                self.check_same_weights()
            if is_last or number or done in self.iterates.steps or self._is_due(done):
                self.commit()
            if number and done < session.num_steps:
                message = f"Stopped after step {done} of {session.num_steps}. {_AGAIN}"
                worker_group.leave(self._workers, AgreedStopError(message, number))
            if is_last:
                return

    def _before_step(self, drawn: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the noise among the draws of a step."""
        self.averages.before_step(self.session.num_steps_executed)
        adapts = self._bounded.adaptive is not None
        of_noise = len(self._weights) + adapts
        if self._hooks.optimizer is not None:
            self._optimizer.before_step(drawn[of_noise:])
        return drawn[:of_noise]

    def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is due; all workers get the same answer."""
        if self._every is not None:
            return step % self._every == 0
        if step % self._cheap_every:
            return False
        due = time.monotonic() - self._saved_at >= _CHECKPOINT_SECONDS
        if self._lazy is None or self._workers.count == 1:
            return due  # only the chief commits, and no row is exchanged
        return bool(self._workers.chiefs(b"due" if due else b""))

    def check_same_weights(self) -> None:
        """Refuses, by an AgreedError, workers whose states differ."""
        values = (variable.numpy() for variable in self._variables.values())
        worker_group.same_arrays(self._workers, values, self.session.num_steps_executed)


_AGAIN = "Give the same command, or run the same cell, to continue."
_STOPPED = f"Stopped. {_AGAIN}"
