"""A training run, from request to exported model, by one or several workers.

Formal guarantees:
  - Nothing is written before everything is checked; then only the folder of the run is
    written, and a noise key if the request puts it elsewhere.
  - The run consumes every step of the plan once and in order, or ends with an error.
  - A run that is killed at any moment and started again with the same request resumes
    from its last checkpoint, and ends with bit-identical weights, metrics and
    statement.  Batches and noise are functions of their keys and the step, TensorFlow's
    kernels are deterministic, and everything else that affects the bits may not change
    (see ``origin``).  A replayed step is the same release, not a second one.
  - The noise of two runs is independent, even if they share a noise key and everything
    else: every run draws its own id before its first step.  A resumed run keeps its
    id; with other settings, batches, initial weights, code, software or kind of machine
    it is refused.  (A copy of an unfinished run's folder is that same run.)
  - Workers have equal settings, batches, code, versions, threads and keys when the
    first step begins, and bit-identical weights at evaluations and at the end.
  - One process at a time writes the folder: a second one is refused, and one that was
    killed is in nobody's way.
  - Only the chief writes, and all workers stop after the same step.
  - A private run marks its batches before its first noise is drawn, and is refused if
    another one has: see ``pipelines.batches.first_use``.
  - The record says "complete" last, when all results are written.
  - No error quotes an example.
  - Losses of training examples, gradient norms and numbers of real rows are not
    reported.

Public: what is written outside of ``private``.  Sensitive: noise key, batches, sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from pipelines.batches.stored import stored
from pipelines.files.json_files import pretty_json
from pipelines.files.paths import StrPath
from pipelines.files.stopping import StoppedError, on_signals
from pipelines.files.storage import write_atomically
from trainer import models
from trainer.averaging.aggregate_evaluation import PastResults
from trainer.averaging.averages import TrainingAverages
from trainer.averaging.best_iterate import BestIterate, without_held_out
from trainer.averaging.iterates import Iterates
from trainer.averaging.uncertainty import column_names
from trainer.claims import lazy_tables
from trainer.claims.lazy_noise import LazyNoise
from trainer.claims.workers import agreement, launch
from trainer.claims.workers.agreement import AgreedStopError
from trainer.core.run.batches import BatchSource, element_spec
from trainer.core.run.captured_state import CapturedState
from trainer.core.run.checkpoints import Checkpoints
from trainer.core.run.session import Session
from trainer.core.run.session_state import SessionState
from trainer.core.step.dp_step import Step
from trainer.core.step.pure_graph import check_pure
from trainer.core.step.workers import Workers
from trainer.export.export import check_export, export
from trainer.gradients.engine import proof
from trainer.methods import registry
from trainer.methods.base import Hooks
from trainer.methods.optimizers import make_optimizer
from trainer.model import initial_weights
from trainer.model.evaluation import Evaluator, with_masks
from trainer.model.grouped_model import of_users
from trainer.model.target import target_of
from trainer.model.user_code import load_function
from trainer.model.user_rows import of_one_row
from trainer.model.views import Views, first_view, load_views
from trainer.report import plots
from trainer.report.progress import Reporter, Silent
from trainer.report.run_files import CURVE_NAME, CURVE_PLOT_NAME, METRICS_NAME
from trainer.run import (
    preflight,
    privacy,
    stored_run,
    threads,
    traced_origin,
)
from trainer.run.preflight import Checked, Request
from trainer.run.stored_run import StoredRun, StoreError
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.train_settings import DEFAULT_MODEL, TrainSettings
from trainer.tf_compat import get_keras_mask, keras, raw_variable, tf

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Results of a finished run.  Public, if the held-out examples need no protection.

    Attributes:
      run: The folder, or that in the store.
      metrics: Final metrics of the held-out examples.
      statement: The privacy statement as JSON; without a delta, why there is none.
      text: The privacy statement as text.
    """

    run: StrPath
    metrics: dict[str, Any]
    statement: dict[str, Any]
    text: str

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        return {
            "run": str(self.run),
            "metrics": self.metrics,
            "privacy": self.statement,
        }


def train(request: Request, reporter: Reporter | None = None) -> Summary:
    """Trains, evaluates, exports and states the privacy of one run.

    Args:
      request: What to train, on which batches, and where results go.
      reporter: Receives public progress; None for none.

    Raises:
      InputError: before any work if the request is refused; later if the batches are
        not what their manifest says, or a store fails.
      StoppedError: SIGTERM or SIGINT arrived; the same request continues the run.
    """
    stored_run.fetch(request)
    return run_checked(preflight.check(request), reporter or Silent())


def run_checked(
    checked: Checked, reporter: Reporter, workers: Workers | None = None
) -> Summary:
    """Does what ``train`` does, for a request that is already checked.

    Args:
      checked: From ``preflight.check``.
      reporter: Receives public progress.
      workers: The workers that share the steps, of which this is the chief; None for
        this process alone.

    Raises:
      InputError: the batches are not what their manifest says, or the model, the
        optimizer or the method does not support private training.
      StoppedError: as ``train``.
    """
    with contextlib.ExitStack() as held:
        workers = workers or launch.alone()
        training = _Training(checked, reporter, workers, held)
        with training.recorded(), _stop_signals(workers.count) as stop:
            training.run_steps(stop)
            return training.finish()


def help_chief(checked: Checked, workers: Workers) -> None:
    """Executes the steps of a run as a worker; the chief writes and reports.

    Other errors are those of ``run_checked``.

    Args:
      checked: From ``preflight.check`` of a worker that is not the chief.
      workers: All workers of the run.

    Raises:
      SystemExit: the chief failed, and reports why.
    """
    with contextlib.ExitStack() as held:
        training = _Training(checked, Silent(), workers, held)
        with _stop_signals(workers.count) as stop:
            training.run_steps(stop)


def _make_model(checked: Checked, views: Views) -> models.TrainableModel:
    settings = checked.request.settings
    # Names of layers contain counters; a resumed run must have the same names.
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(settings.init_seed)
    tf.config.experimental.enable_op_determinism()
    model = models.make_model(
        of_one_row(checked.manifest),
        model=settings.model,
        embedding_dim=settings.embedding_dim,
        hidden=settings.hidden,
        loss=models.make_loss(settings.loss),
        views=views,
    )
    if settings.initial_weights is None:
        return model
    initial = initial_weights.read(pathlib.Path(settings.initial_weights))
    initial.assign(model.variables)
    described = {**model.description, **initial.describe()}
    return dataclasses.replace(model, description=described)


def _make_optimizer(
    checked: Checked, model: models.TrainableModel, hooks: Hooks
) -> Any:
    settings, num_steps = checked.request.settings, checked.manifest.plan.num_steps
    if hooks.optimizer is None:
        return make_optimizer(settings, num_steps)
    return hooks.optimizer(settings, num_steps, model.optimized)


def _make_evaluator(checked: Checked, model: models.TrainableModel) -> Evaluator | None:
    if checked.held_out is None:
        return None
    metric = checked.request.settings.metric
    return Evaluator(
        held_out=checked.held_out,
        model=model,
        predict=_make_predict(model, checked),
        metric=load_function(metric, "metric") if metric is not None else None,
        target=target_of(checked.manifest),
    )


@contextlib.contextmanager
def _stop_signals(num_workers: int) -> Iterator[list[int]]:
    """Collects stop signals, so that the run can stop after a step."""
    received: list[int] = []

    def receive(number: int) -> None:
        # A second one stops immediately; workers get that of their process group twice,
        # since a launcher passes it on.
        if received and num_workers == 1:
            raise StoppedError("Stopped. Give the same command to continue.", number)
        received.append(number)

    with on_signals(receive):
        yield received


class _Training:
    """A session, with checkpoints, evaluation, averages and results."""

    def __init__(
        self,
        checked: Checked,
        reporter: Reporter,
        workers: Workers,
        held: contextlib.ExitStack,
    ) -> None:
        self._checked, self._reporter = checked, reporter
        self._workers, self._is_chief = workers, workers.is_chief
        self._request, self._settings = checked.request, checked.request.settings
        self._plan = checked.manifest.plan
        self._stop: int | None = None
        self._fix_threads()
        self._together(self._make)
        self.session = Session(
            settings=self._settings,
            manifest=checked.manifest,
            noise_multiplier=checked.noise_multiplier,
            batches=stored(self._request.batches),
            run=self._request.run,
            noise_key_file=self._request.noise_key_file,
            take_batches=self._take_batches,
            batches_used_before=self._request.batches_used_before,
            workers=workers,
        )
        self._captured = self._together(self._trace_step)
        self._together(self._take_weights)
        # All checks passed; nothing was written before.
        self.session.open(held, resumes=checked.resumes)
        self._averages = TrainingAverages(self._model.variables, self._settings)
        self._best = self._find_best()
        run, run_key = self._request.run, self._identify()
        self._checkpoints = Checkpoints(run=run, run_key=run_key)
        self._stored = StoredRun(run, self._request.store, resumes=checked.resumes)
        self._iterates = Iterates(
            run=run, run_key=run_key, steps=self._flush_steps.kept_steps
        )
        self._variables = self._all_variables()
        self._not_only_read = [*self._variables, *self._buffers]
        self._only_read = self._captured.values(but=self._not_only_read)
        self._state = self._restored()
        self._together(self._recover_iterates)

    def _together(self, work: Callable[[], _T]) -> _T:
        return self._workers.together(work)

    def _fix_threads(self) -> None:
        """Fixes the threads as they were, before TensorFlow computes anything."""
        began = self._checked.began_under and self._checked.began_under["threads"]
        sent = json.loads(self._workers.chiefs(json.dumps(began).encode()))
        self._together(lambda: threads.fix(sent))

    def _make(self) -> None:
        """Makes the model, the optimizer and the other parts of a step."""
        checked, settings = self._checked, self._settings
        views = load_views(settings.views, settings.augment)
        self._model = _make_model(checked, views)
        self._trained = models.make_trained(self._model, checked.manifest, views)
        self._evaluator = _make_evaluator(checked, self._model)
        if settings.uncertainty is not None:
            column_names(self._model.label_names)
        self._hooks = registry.hooks_of(settings.method)
        self._optimizer = _make_optimizer(checked, self._model, self._hooks)
        self._bounded = registry.step_sum(
            self._trained, settings, self._plan, checked.noise_multiplier
        )
        if settings.model != DEFAULT_MODEL:  # tests cover its export
            check_export(self._model, models.manifest_of(self._model, checked.manifest))
        self._describe()
        self._choose_noise()

    def _choose_noise(self) -> None:
        """Chooses the tables whose noise is lazy, and when it is completed."""
        settings, num_steps = self._settings, self._plan.num_steps
        tables = lazy_tables.choose(
            self._trained,
            self._optimizer,
            settings,
            manifest=self._checked.manifest,
            checkpoint_every=self._request.checkpoint_every,
        )
        if tables.message:
            self._reporter.say(tables.message)
        self._lazy: LazyNoise | None = None
        if tables.reads is not None and self._bounded.bound is not None:
            self._lazy = LazyNoise(
                tables.reads, bounded=self._bounded, workers=self._workers
            )
        self._flush_steps = lazy_tables.FlushSteps(
            every=tables.flush_every,
            eval_steps=settings.eval_steps(num_steps),
            kept_steps=settings.kept_steps(num_steps),
            num_steps=num_steps,
        )

    def _describe(self) -> None:
        """Says what is trained."""
        settings, plan, noise = self._settings, self._plan, self._bounded
        self._reporter.say(
            f"{settings.method} on {plan.sampler} batches: "
            f"{plan.num_steps} steps of {plan.expected_batch_size} expected examples "
            f"of {plan.num_examples}, {self._model.description['num_parameters']} "
            "parameters"
            + (
                ""
                if noise.noise_multiplier is None
                else f", noise multiplier {noise.noise_multiplier:.6g}"
            )
        )
        if settings.initial_weights is not None:
            self._reporter.say(
                f"starting at {settings.initial_weights}, declared public"
            )
        if settings.method != NON_PRIVATE:
            path = _path_of(self._trained, settings)
            self._reporter.say(f"per-example gradients: {path}")

    def _find_best(self) -> BestIterate | None:
        """Returns what stops a run without privacy early; None for private runs."""
        if self._settings.method != NON_PRIVATE:
            return None
        manifest = self._checked.manifest
        model = of_users(self._model, manifest)  # one view of a row, without dropout
        return BestIterate(
            self._model.variables,
            lambda columns: model.losses(first_view(columns, model)),
            BatchSource(self.session.batches, manifest),
        )

    def _trace_step(self) -> CapturedState:
        self._adaptive = self._bounded.adaptive
        step = Step(
            self._model.optimized,
            self._bounded,
            self._optimizer,
            lazy=self._lazy,
            workers=self._workers,
        )
        self.session.use(
            step,
            optimizer=self._settings.describe_optimizer(),
            model=self._trained.description,
            seeds=self._trained.seeds,
        )
        return self.session.captured()

    def _all_variables(self) -> list[Any]:
        """Returns all variables that later steps or results depend on."""
        of_keras = [*self._model.network.weights, *self._optimizer.variables]
        declared = [*map(raw_variable, of_keras), *self._averages.variables]
        declared += [] if self._best is None else self._best.variables
        # Keras's Nadam, for one, has state that it does not declare.
        return [*declared, *self._captured.written(but=[*declared, *self._buffers])]

    @property
    def _buffers(self) -> list[Any]:
        """The variables that each step fills anew.  Sensitive."""
        of_tables = [] if self._lazy is None else self._lazy.buffers
        of_method = [] if self._hooks.optimizer is None else self._optimizer.buffers
        return [*of_tables, *of_method]

    def _save(self) -> None:
        if self._is_chief:
            self._captured.check_unchanged(self._only_read, but=self._not_only_read)
            self._state.save(self._done)

    def _take_weights(self) -> None:
        used = self._captured.function.graph.variables
        network, batches = self._model.network, self._request.batches
        initial_weights.take(network, used, batches, self.session)

    def _identify(self) -> bytes:
        checked, model = self._checked, self._trained
        origin = self._together(
            lambda: traced_origin.find(checked, model, self._optimizer, self._captured)
        )
        self.session.compare(origin)
        self._together(
            lambda: traced_origin.settle(checked, origin) if self._is_chief else None
        )
        # A flush draws noise, so its schedule identifies the run.
        identity = {"origin": origin, "flush_every": self._flush_steps.every}
        return self.session.identify(identity, model=models.identity(model))

    def _recover_iterates(self) -> None:
        if self._is_chief:
            self._iterates.recover(self._done)

    def _restored(self) -> SessionState:
        held_out = self._checked.held_out
        digest = "" if held_out is None else held_out.digest
        state = SessionState(
            self._checkpoints,
            self._variables,
            every=self._request.checkpoint_every,
            held_out=digest if self._is_chief else None,
            relies_on=self.session.relies_on,
            after_save=self._stored.send,
            workers=self._workers,
        )
        done = state.restore()
        if done is not None:
            self.session.num_steps_executed = done
            self.session.relied_on = state.relies_on
            self._reporter.say(f"continuing after step {done}")
        self._check_same_weights()
        return state

    def _take_batches(self, run_id: str) -> None:
        request = self._request
        preflight.take_batches(
            run_id,
            batches=request.batches,
            folder=request.store or request.run,
            settings=request.settings,
            shared=request.batches_used_before,
            say=self._reporter.say,
        )

    def _check_same_weights(self) -> None:
        agreement.same_arrays(
            self._workers, (v.numpy() for v in self._variables), self._done
        )

    @property
    def _done(self) -> int:
        return self.session.num_steps_executed

    # -- steps ---------------------------------------------------------------------

    def run_steps(self, stop: list[int]) -> None:
        """Executes the remaining steps."""
        if not self._state.points:
            # Also refuses unusable held-out rows before the first step.
            self._evaluate()
        self._reporter.start(self._plan.num_steps, done=self._done)
        with self.session.steps(draw=self._hooks.draw) as steps:
            for drawn, parts in steps:
                noise = self._before_step(drawn)
                if self._best is not None:
                    parts = map(without_held_out, parts)
                number = self.session.execute(noise, parts, stop=next(iter(stop), None))
                self._after_step(number)
        self._reporter.stop()

    def _before_step(self, drawn: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the noise among the draws of a step."""
        self._averages.before_step(self._done)
        of_noise = len(self._model.variables) + (self._adaptive is not None)
        if self._hooks.optimizer is not None:
            self._optimizer.before_step(drawn[of_noise:])
        return drawn[:of_noise]

    def _flush(self) -> None:
        """Adds the outstanding lazy noise; before that only a step may read weights."""
        if self._lazy is not None:
            self._lazy.flush(self.session.later_noise().of_flush)

    def _after_step(self, stop: int | None) -> None:
        """Evaluates and saves if due; stops at a signal that any worker received."""
        self._stop = self._stop or stop
        self._averages.after_step(self._done)
        last = self._done == self._plan.num_steps
        whole = self._lazy is None or self._flush_steps.contain(self._done)
        if whole:
            self._flush()
        if self._done % self._settings.eval_steps(self._plan.num_steps) == 0 or last:
            self._check_same_weights()
            self._evaluate()
        if self._done in self._iterates.steps and self._is_chief:
            self._iterates.keep(self._done, [v.numpy() for v in self._model.variables])
        if whole and (self._state.save_is_due(self._done) or self._stop or last):
            self._save()
        self._reporter.advance(self._done)
        if self._stop and whole and not last:
            message = (
                f"Stopped after step {self._done} of {self._plan.num_steps}. Give the "
                "same command to continue."
            )
            agreement.leave(self._workers, AgreedStopError(message, self._stop))

    def _evaluate(self) -> None:
        if self._best is not None:
            self._best.update(self._done)
        if self._evaluator is None:
            return
        point = {"step": self._done, **self._evaluator.metrics()}
        if self._adaptive is not None:
            point["l2_norm_clip"] = float(self._adaptive.norm)
        if self._settings.evaluate_averages:
            point["aggregates"] = {n: self._metrics_of(n) for n in self._averages}
        self._state.points.append(point)

    def _metrics_of(self, average: str) -> dict[str, Any]:
        assert self._evaluator is not None
        with self._averages.swapped(average):
            return self._evaluator.metrics()

    # -- results -------------------------------------------------------------------

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Writes the record of an incomplete run, also if it ends early."""
        try:
            with self.session.recorded():
                yield
        except StoreError:
            raise
        except BaseException:
            with contextlib.suppress(StoreError):
                self._stored.send()
            raise

    def finish(self) -> Summary:
        """Writes all results; the record last."""
        run = self._request.run
        self.session.check_folder()
        self._stop_early()
        self._reporter.say("exporting the model")
        self._export()
        text, statement = privacy.write_statement(
            run,
            self.session.record(complete=True),
            self._checked.manifest,
            allow_large_delta=self._settings.allow_large_delta,
        )
        found = self._finish_averages()
        metrics = self._write_metrics(found) if self._evaluator is not None else {}
        self.session.write_record(complete=True)
        self._checkpoints.remove()
        self._stored.send()
        return Summary(
            run=self._request.store or run,
            metrics=metrics,
            statement=statement,
            text=text,
        )

    def _stop_early(self) -> None:
        """Makes the best iterate of a run without privacy the last one."""
        if self._best is None:
            return
        self._best.restore()
        points = self._state.points
        points[:] = [point for point in points if point["step"] <= self._best.step]
        self._reporter.say(
            f"best after step {self._best.step}, on training rows held out for that"
        )

    def _write_metrics(self, of_averages: dict[str, Any]) -> dict[str, Any]:
        run, points = self._request.run, self._state.points
        metrics = dict(points[-1])
        if self._best is None:  # else the step is not the last one
            del metrics["step"]
        metrics = {"examples": "held-out", "method": self._settings.method, **metrics}
        metrics |= of_averages
        for name, value in (
            (METRICS_NAME, metrics),
            (CURVE_NAME, {"examples": "held-out", "points": points}),
        ):
            write_atomically(run / name, pretty_json(value))
        title = f"{self._settings.method}, {self._plan.sampler} batches"
        plots.plot_curve(points, run / CURVE_PLOT_NAME, title=title)
        return metrics

    def _finish_averages(self) -> dict[str, Any]:
        aggregates, uncertainty = {}, None
        evaluator = self._evaluator
        if evaluator is not None and (self._averages or self._iterates.steps):
            self._reporter.say("evaluating averages of the weights")
        for name in self._averages:
            with self._averages.swapped(name):
                self._export(name)
            if evaluator is not None:
                aggregates[name] = self._metrics_of(name)
        if self._iterates.steps:
            past, weights = self._iterates, self._model.variables
            results = PastResults(past, weights, evaluator, self._settings)
            metrics, uncertainty = results.evaluate(self._export)
            aggregates |= metrics
        return {
            "guessing": evaluator and evaluator.guessing(),
            "aggregates": aggregates,
            "uncertainty": uncertainty,
        }

    def _export(self, average: str | None = None) -> None:
        manifest = models.manifest_of(self._model, self._checked.manifest)
        export(self._model, manifest, self._request.run, average=average)


def _path_of(model: models.TrainableModel, settings: TrainSettings) -> str:
    """Returns how the gradients are computed, and why not in one pass."""
    path, why = registry.choose_path(model, settings), proof.obstacle(model)
    return path if why is None else f"{path}, since {why}"


def _make_predict(model: models.TrainableModel, checked: Checked) -> Any:
    specs = element_spec(of_one_row(checked.manifest))["columns"]
    columns = {
        name: tf.TensorSpec((None, *spec.shape[1:]), spec.dtype)
        for name, spec in specs.items()
    }

    def of_rows(rows: Any) -> Any:
        found = model.outputs(first_view(rows, model))
        return found, tf.nest.map_structure(get_keras_mask, found)

    outputs = tf.function(of_rows, input_signature=[columns], autograph=False)
    check_pure(outputs.get_concrete_function().graph, "the model")
    return lambda rows: with_masks(*outputs(dict(rows)))
