"""A training run, from request to exported model, by one or several workers.

`train` makes the model of the request and calls its ``fit`` (``keras_model``), whose
loop is ``trainer.training_loop``.

Nothing is written before everything is checked; then only the folder of the run is
written, by the chief alone.  The run consumes every step of the plan once and in order,
or ends with an error.  A run that is killed and started again with the same request
goes on from its last checkpoint.  A second process is refused; one that was killed is
in nobody's way.  The record says "complete" last, when all results are written.

Workers have equal settings, batches and versions when the first step begins, stop after
the same step, and have bit-identical weights at evaluations and at the end.

Neither losses of training examples, gradient norms nor numbers of real rows are
reported, and no error quotes an example.

Public: what is written outside of ``private``.  Sensitive: batches, noise, sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from pipelines.files.storage import StrPath, pretty_json, write_atomically
from trainer import models
from trainer.claims import launch
from trainer.core.run.session import element_spec
from trainer.core.step.pure_graph import check_pure
from trainer.core.step.workers import Workers
from trainer.core.tf_compat import get_keras_mask, keras, tf
from trainer.export import check_export, export
from trainer.gradients import proof
from trainer.keras_model import PrivateModel
from trainer.model import weights
from trainer.model.evaluation import Evaluator, with_masks
from trainer.model.rows import target_of
from trainer.model.trainable_model import load_views
from trainer.model.user_code import load_function
from trainer.report import report
from trainer.report.progress import Reporter, Silent
from trainer.report.run_files import CURVE_NAME, CURVE_PLOT_NAME, METRICS_NAME
from trainer.run import hooks, preflight, privacy, stored_run
from trainer.run.averages import PastResults
from trainer.run.optimizers import make_optimizer
from trainer.run.preflight import Checked, Request
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.train_settings import DEFAULT_MODEL, TrainSettings
from trainer.training_loop import Training


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
    found = workers or launch.of_this_process()
    with contextlib.ExitStack() as held:
        run = found.together(lambda: _Run(checked, reporter, found, held))
        run.fit()
        return run.finish()


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
        workers.together(lambda: _Run(checked, Silent(), workers, held)).fit()


def _make_model(checked: Checked) -> models.TrainableModel:
    settings = checked.request.settings
    # Names of layers contain counters, and would depend on earlier runs.
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(settings.init_seed)
    tf.config.experimental.enable_op_determinism()
    model = models.make_model(
        checked.manifest,
        model=settings.model,
        embedding_dim=settings.embedding_dim,
        hidden=settings.hidden,
        loss=models.make_loss(settings.loss),
    )
    return model.described(weights.start_at(settings.initial_weights, model.variables))


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


class _Run:
    """A model that is trained as a request says, and its results.

    Attributes:
      model: The private model.
    """

    def __init__(
        self,
        checked: Checked,
        reporter: Reporter,
        workers: Workers,
        held: contextlib.ExitStack,
    ) -> None:
        request, settings = checked.request, checked.request.settings
        self._checked, self._reporter = checked, reporter
        self._request, self._settings = request, settings
        self._plan, self._is_chief = checked.manifest.plan, workers.is_chief
        self._training = Training(
            settings=settings,
            manifest=checked.manifest,
            noise_multiplier=checked.noise_multiplier,
            batches=request.batches,
            run=request.run,
            store=request.store,
            workers=workers,
            reporter=reporter,
            checkpoint_every=request.checkpoint_every,
            batches_used_before=request.batches_used_before,
            keeps_best=settings.method == NON_PRIVATE,
            held_out="" if checked.held_out is None else checked.held_out.digest,
        )
        views = load_views(settings.views, settings.augment)
        self._model = _make_model(checked)
        self._evaluator = _make_evaluator(checked, self._model)
        if settings.model != DEFAULT_MODEL:  # tests cover its export
            check_export(self._model, checked.manifest)
        self._describe()
        self.model = PrivateModel(
            self._model.network,
            self._training,
            views=views,
            resumes=checked.resumes,
            held=held,
        )
        optimizer = make_optimizer(settings, self._plan.num_steps)
        described = settings.describe_optimizer()
        trained = self.model.train_with(self._model, settings, optimizer, described)
        if settings.method != NON_PRIVATE:
            reporter.say(f"per-example gradients: {_path_of(trained, settings)}")

    def _describe(self) -> None:
        """Says what is trained."""
        settings, plan = self._settings, self._plan
        noise = self._checked.noise_multiplier
        self._reporter.say(
            f"{settings.method} on {plan.sampler} batches: "
            f"{plan.num_steps} steps of {plan.expected_batch_size} expected examples "
            f"of {plan.num_examples}, {self._model.description['num_parameters']} "
            "parameters" + ("" if noise is None else f", noise multiplier {noise:.6g}")
        )
        if settings.initial_weights is not None:
            self._reporter.say(
                f"starting at {settings.initial_weights}, declared public"
            )

    def fit(self) -> None:
        """Takes the steps that are left, and evaluates between them."""
        self.model.fit(
            steps_per_epoch=self._settings.eval_steps(self._plan.num_steps),
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_train_begin=lambda logs: self._begin_curve(),
                    on_epoch_end=lambda epoch, logs: self._evaluate(),
                )
            ],
            verbose=0,
        )

    def _begin_curve(self) -> None:
        """Evaluates initial weights; it also refuses unusable held-out rows."""
        if self._training.session.num_steps_executed == 0:
            self._training.points.clear()
            self._evaluate()

    def _evaluate(self) -> None:
        """Adds a point to the curve."""
        training = self._training
        done = training.session.num_steps_executed
        if training.best is not None:
            training.best.update(done)
        if self._evaluator is None:
            return
        point = {"step": done, **self._evaluator.metrics()}
        if training.adaptive_clip is not None:
            point["l2_norm_clip"] = float(training.adaptive_clip.norm)
        if self._settings.evaluate_averages:
            point["aggregates"] = {n: self._metrics_of(n) for n in training.averages}
        training.points.append(point)

    def _metrics_of(self, average: str) -> dict[str, Any]:
        assert self._evaluator is not None
        with self._training.averages.swapped(average):
            return self._evaluator.metrics()

    # -- results -------------------------------------------------------------------

    def finish(self) -> Summary:
        """Writes all results; the record last."""
        run, training = self._request.run, self._training
        self._stop_early()
        self._reporter.say("exporting the model")
        self._export()
        text, statement = privacy.write_statement(
            run,
            training.session.record(complete=True),
            self._checked.manifest,
            allow_large_delta=self._settings.allow_large_delta,
        )
        found = self._finish_averages()
        metrics = self._write_metrics(found) if self._evaluator is not None else {}
        training.finish()
        return Summary(
            run=self._request.store or run,
            metrics=metrics,
            statement=statement,
            text=text,
        )

    def _stop_early(self) -> None:
        """Makes the best iterate of a run without privacy the last one."""
        best, points = self._training.best, self._training.points
        if best is None:
            return
        best.restore()
        points[:] = [point for point in points if point["step"] <= best.step]
        self._reporter.say(
            f"best after step {best.step}, on training rows held out for that"
        )

    def _write_metrics(self, of_averages: dict[str, Any]) -> dict[str, Any]:
        run, points = self._request.run, self._training.points
        metrics = dict(points[-1])
        if self._training.best is None:  # else the step is not the last one
            del metrics["step"]
        metrics = {"examples": "held-out", "method": self._settings.method, **metrics}
        metrics |= of_averages
        for name, value in (
            (METRICS_NAME, metrics),
            (CURVE_NAME, {"examples": "held-out", "points": points}),
        ):
            write_atomically(run / name, pretty_json(value))
        title = f"{self._settings.method}, {self._plan.sampler} batches"
        report.plot_curve(points, run / CURVE_PLOT_NAME, title=title)
        return metrics

    def _finish_averages(self) -> dict[str, Any]:
        aggregates = dict[str, Any]()
        evaluator, averages = self._evaluator, self._training.averages
        iterates = self._training.iterates
        if evaluator is not None and (averages or iterates.steps):
            self._reporter.say("evaluating averages of the weights")
        for name in averages:
            with averages.swapped(name):
                self._export(name)
            if evaluator is not None:
                aggregates[name] = self._metrics_of(name)
        if iterates.steps:
            weights = self._model.variables
            results = PastResults(iterates, weights, evaluator, self._settings)
            aggregates |= results.evaluate(self._export)
        return {
            "guessing": evaluator and evaluator.guessing(),
            "aggregates": aggregates,
        }

    def _export(self, average: str | None = None) -> None:
        export(
            self._model,
            self._checked.manifest,
            self._request.run,
            average=average,
        )


def _path_of(model: models.TrainableModel, settings: TrainSettings) -> str:
    """Returns how the gradients are computed, and why not in one pass."""
    path, why = hooks.choose_path(model, settings), proof.obstacle(model)
    return path if why is None else f"{path}, since {why}"


def _make_predict(model: models.TrainableModel, checked: Checked) -> Any:
    specs = element_spec(checked.manifest)["columns"]
    columns = {
        name: tf.TensorSpec((None, *spec.shape[1:]), spec.dtype)
        for name, spec in specs.items()
    }

    def of_rows(rows: Any) -> Any:
        found = model.outputs(model.columns_of(rows))
        return found, tf.nest.map_structure(get_keras_mask, found)

    outputs = tf.function(of_rows, input_signature=[columns], autograph=False)
    check_pure(outputs.get_concrete_function().graph, "the model")
    return lambda rows: with_masks(*outputs(dict(rows)))
