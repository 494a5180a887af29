"""A training run from checked request to exported model.

Formal guarantees:
  - Nothing is written before everything was checked; then, in the folder of the run
    alone, but for a noise key that is asked for elsewhere.
  - The run consumes every step of the plan once and in order, or ends with an error.
  - Killed at any moment and started again with the same request, it goes on from its
    last checkpoint and ends with bit-identical weights, metrics and statement: batches
    and noise are functions of their keys and the step, TensorFlow is told to be
    deterministic, and ``origin`` says what else the bits follow from, which may not
    change.  A replayed step is the same release, not a second one.
  - The noise of two runs is independent, also where they share a noise key and all
    else: every run draws an id of its own before its first step.  A run that goes on
    keeps its id; with other settings, batches, initial weights, code, software or kind
    of machine it is refused.  (A copy of an unfinished run's folder is that same run.)
  - The record says "complete" last, when all results are written.
  - No error quotes an example.
  - Neither losses, gradient norms nor numbers of real rows are computed for people,
    but for ``clipping_bias`` where it is asked for.

Public: what is written outside of ``private``.  Sensitive: noise key, batches, sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipelines.batches.manifest import PRIVATE_NAME, pretty_json, write_atomically
from pipelines.files.stopping import StoppedError, on_signals
from pipelines.sampling import keys
from trainer import models
from trainer.averaging.aggregate_evaluation import PastResults
from trainer.averaging.averages import TrainingAverages
from trainer.averaging.iterates import Iterates
from trainer.gradients.clipping import GradientSum
from trainer.gradients.clipping_bias import NonPrivateClippingBias
from trainer.gradients.dp_step import Step
from trainer.gradients.lazy_noise import LazyNoise
from trainer.gradients.noise import LaterNoise, NoiseStream, step_noise_and_coefficients
from trainer.methods import lazy_tables, registry
from trainer.methods.dp_sat import SharpnessAwareOptimizer
from trainer.methods.model_mix import MixingOptimizer
from trainer.methods.optimizers import learning_rate, make_optimizer
from trainer.model.evaluation import Evaluator
from trainer.model.user_code import load_function, withhold_values
from trainer.report import curve_files, plots
from trainer.report.progress import Reporter, Silent
from trainer.run import preflight, privacy, run_record, threads, traced_origin
from trainer.run.batches import BatchSource, Element, element_spec
from trainer.run.checkpoints import Checkpoints
from trainer.run.export import check_export, export
from trainer.run.preflight import Checked, Request
from trainer.run.run_record import RunRecord, StepLedger
from trainer.run.session_state import SessionState
from trainer.settings.method_settings import DP_SAT, MODEL_MIX, NON_PRIVATE
from trainer.settings.train_settings import CLICK_MODEL
from trainer.tf_compat import keras, tf

NON_PRIVATE_DIAGNOSTICS = (
    "writing NON-PRIVATE diagnostics below private/: epsilon does not cover them"
)
_NOT_PRIVATE = (
    "This run is not private: gradients were not clipped and no noise was added. "
    "No epsilon can be stated."
)
_NO_DELTA = (
    "No epsilon is stated, since no delta was given. "
    "`dpsgd account RUN --delta D` states one."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a finished run is.  Public, if the held-out examples need no protection.

    Attributes:
      run: The folder.
      metrics: Of the held-out examples, at the end.
      statement: The privacy statement as JSON; without a delta, why there is none.
      text: The same for people.
    """

    run: pathlib.Path
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

    Raises:
      InputError: before any work if the request is refused; later if the batches are
        not what their manifest says.
      StoppedError: SIGTERM or SIGINT arrived; the same request continues the run.
    """
    return run_checked(preflight.check(request), reporter or Silent())


def run_checked(checked: Checked, reporter: Reporter) -> Summary:
    """Does what ``train`` does, for a request that was checked already."""
    # Before TensorFlow computes anything: then it is too late.
    threads.fix(checked.began_under and checked.began_under["threads"])
    model = _make_model(checked)
    settings = checked.request.settings
    evaluator = _make_evaluator(checked, model)
    optimizer = _make_optimizer(checked, model)
    tables = lazy_tables.choose(
        model,
        optimizer,
        settings,
        manifest=checked.manifest,
        checkpoint_every=checked.request.checkpoint_every,
    )
    gradient_sum = registry.gradient_sum(model, settings)
    if settings.model != CLICK_MODEL:  # whose export is tested
        check_export(model, checked.manifest)
    reporter.say(_describe(checked, model))
    if settings.method != NON_PRIVATE:
        path = registry.choose_path(model, settings)
        reporter.say(f"per-example gradients: {path}")
    session = _Session(
        checked,
        model,
        evaluator,
        optimizer,
        gradient_sum,
        tables,
        _open_run(checked),
        reporter,
    )
    with session.recorded(), _stop_signals() as stop:
        session.run_steps(stop)
        return session.finish()


def _describe(checked: Checked, model: models.TrainableModel) -> str:
    plan, noise = checked.manifest.plan, checked.noise_multiplier
    return (
        f"{checked.request.settings.method} on {plan.sampler} batches: "
        f"{plan.num_steps} steps of {plan.expected_batch_size} expected examples of "
        f"{plan.num_examples}, {model.description['num_parameters']} parameters"
        + (f", noise multiplier {noise:.6g}" if noise is not None else "")
    )


def _make_model(checked: Checked) -> models.TrainableModel:
    settings = checked.request.settings
    # Names of layers count up in a process; a resumed run must see the same ones.
    keras.backend.clear_session()
    keras.utils.set_random_seed(settings.init_seed)
    tf.config.experimental.enable_op_determinism()
    return models.make_model(
        checked.manifest,
        model=settings.model,
        embedding_dim=settings.embedding_dim,
        hidden=settings.hidden,
        loss=models.make_loss(settings.loss),
    )


def _make_optimizer(checked: Checked, model: models.TrainableModel) -> Any:
    settings, num_steps = checked.request.settings, checked.manifest.plan.num_steps
    if settings.method != MODEL_MIX:
        return make_optimizer(settings, num_steps)
    assert settings.mix_width is not None  # checked by the settings
    return MixingOptimizer(
        learning_rate(settings, num_steps),
        model.variables,
        mix_width=settings.mix_width,
        init_seed=settings.init_seed,
    )


def _make_evaluator(checked: Checked, model: models.TrainableModel) -> Evaluator:
    metric = checked.request.settings.metric
    return Evaluator(
        held_out=checked.held_out,
        model=model,
        predict=_make_predict(model, checked),
        metric=load_function(metric, "metric") if metric is not None else None,
    )


def _open_run(checked: Checked) -> bytes:
    """Makes the folder, or tidies it, and returns the noise key."""
    request, resumes = checked.request, checked.resumes
    if resumes:
        _remove_leftovers(request.run)
    return run_record.open_run(request.run, request.noise_key_file, resumes=resumes)


def _remove_leftovers(run: pathlib.Path) -> None:
    """Removes what a run that was killed was writing: names that start with a dot."""
    for path in [*run.glob(".*"), *(run / PRIVATE_NAME).glob(".*")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects a signal instead of dying of it between two steps."""
    received: list[int] = []

    def receive(number: int) -> None:
        if received:  # a second signal means at once
            raise StoppedError("Stopped. Give the same command to continue.", number)
        received.append(number)

    with on_signals(receive):
        yield received


class _Session:
    def __init__(
        self,
        checked: Checked,
        model: models.TrainableModel,
        evaluator: Evaluator,
        optimizer: Any,
        gradient_sum: GradientSum,
        tables: lazy_tables.Choice,
        noise_key: bytes,
        reporter: Reporter,
    ) -> None:
        self._checked = checked
        self._request = checked.request
        self._settings = checked.request.settings
        self._plan = checked.manifest.plan
        self._model = model
        self._noise_key = noise_key
        self._reporter = reporter
        self._ascent = self._sharpness_aware(optimizer)
        self._mixing = optimizer if isinstance(optimizer, MixingOptimizer) else None
        self._optimizer = self._ascent or optimizer
        self._lazy = self._lazy_noise(tables)
        self._flush_steps = lazy_tables.FlushSteps(
            every=tables.flush_every,
            eval_steps=self._settings.eval_steps(self._plan.num_steps),
            kept_steps=self._settings.kept_steps(self._plan.num_steps),
            num_steps=self._plan.num_steps,
        )
        self._step = Step(
            model.variables,
            gradient_sum,
            self._optimizer,
            expected_batch_size=self._plan.expected_batch_size,
            lazy=self._lazy,
            autograph=model.needs_autograph,
        )
        self._averages = TrainingAverages(model.variables, self._settings)
        self._evaluator = evaluator
        self._run_key = self._make_run_key(tables.flush_every)
        self._checkpoints = Checkpoints(run=self._request.run, run_key=self._run_key)
        self._iterates = Iterates(
            run=self._request.run,
            run_key=self._run_key,
            steps=self._settings.kept_steps(self._plan.num_steps),
        )
        self._state = SessionState(
            self._checkpoints,
            self._state_variables(),
            every=self._request.checkpoint_every,
            held_out=checked.held_out.digest,
        )
        if self._state.restore():
            reporter.say(f"continuing after step {self._done}")
        self._iterates.recover(self._done)
        self._bias = self._clipping_bias(gradient_sum)

    def _make_run_key(self, flush_every: int) -> bytes:
        checked, model = self._checked, self._model
        origin = traced_origin.settle(checked, model, self._optimizer, self._step)
        identity = preflight.identity_fingerprint(
            {
                "origin": origin,
                "noise_multiplier": checked.noise_multiplier,
                # A flush draws noise: when there is one is part of what the run is.
                "flush_every": flush_every,
            },
            model=models.identity(model),
            run_id=run_record.read_or_create_run_id(self._request.run),
        )
        return keys.derive(self._noise_key, "run", identity)

    @property
    def _done(self) -> int:
        return self._state.num_steps_executed

    def _sharpness_aware(self, optimizer: Any) -> SharpnessAwareOptimizer | None:
        if self._settings.method != DP_SAT:
            return None
        assert self._settings.sat_radius is not None  # checked by the settings
        return SharpnessAwareOptimizer(
            optimizer, self._model.variables, radius=self._settings.sat_radius
        )

    def _clipping_bias(self, clipped: GradientSum) -> NonPrivateClippingBias | None:
        if not self._settings.non_private_diagnostics:
            return None
        self._reporter.say(NON_PRIVATE_DIAGNOSTICS)
        return NonPrivateClippingBias(
            self._request.run,
            self._model.variables,
            clipped=clipped,
            unclipped=registry.gradient_sum(
                self._model, self._settings, l2_norm_clip=math.inf
            ),
            first_step=self._done,
            autograph=self._model.needs_autograph,
        )

    def _lazy_noise(self, tables: lazy_tables.Choice) -> LazyNoise | None:
        if tables.message:
            self._reporter.say(tables.message)
        if tables.reads is None:
            return None
        return LazyNoise(
            tables.reads,
            physical_batch_size=self._checked.manifest.physical_batch_size,
            expected_batch_size=self._plan.expected_batch_size,
        )

    def _state_variables(self) -> list[Any]:
        return [
            *self._model.network.variables,
            *self._optimizer.variables,
            *self._averages.variables,
        ]

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Keeps a record in the folder, also when the run ends early."""
        self._write_record(complete=False)
        try:
            yield
        except BaseException:
            self._write_record(complete=False)
            raise

    def _record(self, *, complete: bool) -> RunRecord:
        private = self._settings.method != NON_PRIVATE
        return RunRecord(
            method=self._settings.method,
            method_settings=self._settings.describe_method(),
            num_steps_executed=self._done,
            complete=complete,
            noise_multiplier=self._checked.noise_multiplier if private else None,
            l2_norm_clip=self._settings.l2_norm_clip,
            expected_batch_size=self._plan.expected_batch_size,
            target_delta=self._settings.target_delta,
            manifest_fingerprint=self._checked.manifest.fingerprint,
            batches_id=self._checked.manifest.batches_id,
            optimizer=self._settings.describe_optimizer(),
            model=self._model.description,
            versions=run_record.versions(),
            simulates=self._settings.simulates,
        )

    def _write_record(self, *, complete: bool) -> None:
        run_record.write_run(
            self._request.run,
            self._record(complete=complete),
            self._checked.manifest,
            self._noise_key,
        )

    # -- steps ---------------------------------------------------------------------

    def run_steps(self, stop: list[int]) -> None:
        """Consumes the steps that are left."""
        ledger = StepLedger(self._plan.num_steps, first_step=self._done)
        source = BatchSource(
            self._request.batches, self._checked.manifest, first_step=self._done
        )
        if not self._state.points:
            # Also finds held-out rows that cannot be used before any step is done.
            self._evaluate()
        self._reporter.start(self._plan.num_steps, done=self._done)
        with self._noise() as noise:
            draws = iter(noise)
            for _, parts in itertools.groupby(source, lambda batch: batch["step"]):
                for batch in parts:
                    ledger.enter(batch["step"], part=batch["part"])
                    if batch["part"] == 0:
                        self._averages.before_step(self._done)
                        if self._ascent is not None:
                            self._ascent.ascend()
                        self._begin(next(draws))
                    self._add(batch)
                withhold_values(self._step.finish)()
                if self._bias is not None:
                    self._bias.finish(ledger.num_executed)
                self._state.num_steps_executed = ledger.num_executed
                self._averages.after_step(self._done)
                self._after_step(stop)
        ledger.finish()
        self._reporter.stop()

    def _begin(self, drawn: list[np.ndarray]) -> None:
        num_variables = len(self._model.variables)
        if self._mixing is not None:
            self._mixing.mix_by(drawn[num_variables:])
        self._step.begin(drawn[:num_variables], self._later_noise())

    @withhold_values
    def _add(self, batch: Element) -> None:
        self._step.add(batch["columns"], batch["weight"])
        if self._bias is not None:
            self._bias.add(batch["columns"], batch["weight"])

    def _noise(self) -> NoiseStream:
        return NoiseStream(
            self._run_key,
            steps=range(self._done, self._plan.num_steps),
            shapes=self._step.shapes,
            noise_stddev=self._checked.noise_stddev,
            draw=None if self._mixing is None else step_noise_and_coefficients,
        )

    def _later_noise(self) -> LaterNoise:
        return LaterNoise(
            noise_key=self._run_key,
            step=self._done,
            noise_stddev=self._checked.noise_stddev,
        )

    def _flush(self) -> None:
        """Completes the weights; nothing but a step may read them before."""
        if self._lazy is not None:
            self._lazy.flush(self._later_noise().of_chunk)

    def _after_step(self, stop: list[int]) -> None:
        last = self._done == self._plan.num_steps
        whole = self._lazy is None or self._flush_steps.contain(self._done)
        if whole:
            self._flush()
        if self._done % self._settings.eval_steps(self._plan.num_steps) == 0 or last:
            self._evaluate()
        if self._done in self._iterates.steps:
            self._iterates.keep(self._done, [v.numpy() for v in self._model.variables])
        if whole and (self._state.save_is_due or stop or last):
            self._state.save()
        self._reporter.advance(self._done)
        if stop and whole and not last:
            raise StoppedError(
                f"Stopped after step {self._done} of {self._plan.num_steps}. Give the "
                "same command to continue.",
                stop[0],
            )

    def _evaluate(self) -> None:
        self._state.points.append({"step": self._done, **self._evaluator.metrics()})
        if self._request.csv is not None:
            curve_files.write_csv(self._state.points, self._request.csv)
        if self._request.tensorboard is not None:
            curve_files.write_events(self._state.points, self._request.tensorboard)

    # -- results -------------------------------------------------------------------

    def finish(self) -> Summary:
        """Writes all results; the record last."""
        run, record = self._request.run, self._record(complete=True)
        points = self._state.points
        self._reporter.say("exporting the model")
        self._export()
        text, statement = self._write_statement(record)
        metrics = {k: v for k, v in points[-1].items() if k != "step"}
        metrics = {"examples": "held-out", "method": record.method, **metrics}
        metrics |= self._finish_averages()
        for name, value in (
            (run_record.METRICS_NAME, metrics),
            (run_record.CURVE_NAME, {"examples": "held-out", "points": points}),
        ):
            write_atomically(run / name, pretty_json(value))
        title = f"{record.method}, {self._plan.sampler} batches"
        plots.plot_curve(points, run / run_record.CURVE_PLOT_NAME, title=title)
        self._write_record(complete=True)
        self._checkpoints.remove()
        return Summary(run=run, metrics=metrics, statement=statement, text=text)

    def _finish_averages(self) -> dict[str, Any]:
        aggregates, uncertainty = {}, None
        if self._averages or self._iterates.steps:
            self._reporter.say("evaluating averages of the weights")
        for name in self._averages:
            with self._averages.swapped(name):
                self._export(name)
                aggregates[name] = self._evaluator.metrics()
        if self._iterates.steps:
            past, weights = self._iterates, self._model.variables
            results = PastResults(past, weights, self._evaluator, self._settings)
            metrics, uncertainty = results.evaluate(self._export)
            aggregates |= metrics
        return {"aggregates": aggregates, "uncertainty": uncertainty}

    def _export(self, average: str | None = None) -> None:
        manifest, run = self._checked.manifest, self._request.run
        export(self._model, manifest, run, average=average)

    def _write_statement(self, record: RunRecord) -> tuple[str, dict[str, Any]]:
        run = self._request.run
        if record.method == NON_PRIVATE:
            text = _NOT_PRIVATE
            fields: dict[str, Any] = {"private": False, "reason": _NOT_PRIVATE}
        elif record.target_delta is None:
            text, fields = _NO_DELTA, {"epsilon": None, "reason": _NO_DELTA}
        else:
            statement = privacy.run_statement(
                record,
                self._checked.manifest,
                delta=None,
                allow_large_delta=self._settings.allow_large_delta,
            )
            text, fields = statement.to_text(), statement.to_json()
        write_atomically(run / run_record.PRIVACY_NAME, pretty_json(fields))
        data = text.rstrip("\n").encode() + b"\n"
        write_atomically(run / run_record.PRIVACY_TEXT_NAME, data)
        return text, fields


def _make_predict(model: models.TrainableModel, checked: Checked) -> Any:
    columns = {
        name: tf.TensorSpec((None, *spec.shape[1:]), spec.dtype)
        for name, spec in element_spec(checked.manifest)["columns"].items()
    }
    outputs = tf.function(
        lambda rows: model.outputs(rows),
        input_signature=[columns],
        autograph=model.needs_autograph,
    )
    return lambda rows: tf.nest.map_structure(np.asarray, outputs(dict(rows)))
