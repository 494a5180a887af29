"""The public names of this project, each imported when it is first used.

    from dpsgd import DpSgdPlan, accountant, read_batches

Formal guarantees:
  - ``import dpsgd`` loads neither NumPy nor a framework; a name loads only what it
    needs (``read_batches`` neither Beam nor TensorFlow).
  - A type checker sees under each name the object that the name has at run time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# `as` tells type checkers that the name is re-exported.
if TYPE_CHECKING:
    from accounting.core import accountant as accountant
    from accounting.core.intervals import Bounds as Bounds
    from accounting.core.intervals import NoiseBounds as NoiseBounds
    from accounting.core.plan import DpSgdPlan as DpSgdPlan
    from accounting.core.plan import steps_per_epoch as steps_per_epoch
    from accounting.core.statement import PrivacyStatement as PrivacyStatement
    from accounting.core.statement import privacy_statement as privacy_statement
    from accounting.core.validation import InputError as InputError
    from accounting.planning import budget as budget
    from dpsgd.command_line import cli as cli
    from dpsgd.command_line import main as main
    from pipelines.batches.folder import read_certificate as read_certificate
    from pipelines.batches.folder import read_manifest as read_manifest
    from pipelines.batches.reader import read_batches as read_batches
    from pipelines.batches.verify import Verification as Verification
    from pipelines.batches.verify import verify as verify
    from pipelines.certify import certify as certify
    from pipelines.core.batches.batch_format import PhysicalBatch as PhysicalBatch
    from pipelines.core.batches.certificate import Certificate as Certificate
    from pipelines.core.batches.manifest import Manifest as Manifest
    from pipelines.inputs.parquet_blocks import Dataset as Dataset
    from pipelines.inputs.parquet_blocks import list_blocks as list_blocks
    from pipelines.job.batch_settings import BatchSettings as BatchSettings
    from pipelines.job.make_batches import make_batches as make_batches
    from pipelines.job.poisson_batches import PoissonBatches as PoissonBatches
    from pipelines.job.poisson_batching import write_batches as write_batches
    from pipelines.job.runtime.tasks import Runtime as Runtime
    from pipelines.job.sizing import make_layout as make_layout
    from pipelines.tables.job.prepare_job import prepare as prepare
    from pipelines.tables.prepared_files import (
        PreparedVerification as PreparedVerification,
    )
    from pipelines.tables.prepared_files import verify_prepared as verify_prepared
    from pipelines.tables.schema.first_schema import first_schema as first_schema
    from pipelines.tables.schema.schema import Schema as Schema
    from pipelines.tables.table_format import TableOptions as TableOptions
    from trainer.auditing.audit import audit as audit
    from trainer.averaging.averaging_callback import AverageWeights as AverageWeights
    from trainer.core.run.run_record import RunRecord as RunRecord
    from trainer.core.run.run_record import read_run as read_run
    from trainer.experiments.compare import compare as compare
    from trainer.html_report.page import write_report as write_report
    from trainer.keras_model import PrivateModel as PrivateModel
    from trainer.keras_model import make_private as make_private
    from trainer.model.layers.function_model import FunctionModel as FunctionModel
    from trainer.papers.bias import measure_bias as measure_bias
    from trainer.papers.settings import BiasSettings as BiasSettings
    from trainer.papers.settings import ShiftSettings as ShiftSettings
    from trainer.papers.settings import SimulationSettings as SimulationSettings
    from trainer.papers.settings import (
        VarianceSettings as VarianceSettings,
    )
    from trainer.papers.shift import shift as shift
    from trainer.papers.simulate import simulate as simulate
    from trainer.papers.variance import variance as variance
    from trainer.prediction.predict import PredictSummary as PredictSummary
    from trainer.prediction.predict import predict as predict
    from trainer.run.preflight import Request as Request
    from trainer.run.privacy import run_statement as run_statement
    from trainer.settings.aggregation_settings import (
        AggregationSettings as AggregationSettings,
    )
    from trainer.settings.audit_settings import AuditSettings as AuditSettings
    from trainer.settings.comparison_settings import (
        ComparisonSettings as ComparisonSettings,
    )
    from trainer.settings.train_settings import TrainSettings as TrainSettings
    from trainer.settings.user_levels import UserLevels as UserLevels
    from trainer.train import Summary as Summary
    from trainer.train import train as train

__version__ = "0.1.0"

#: Public name -> the module that defines it.
_HOMES = {
    "AggregationSettings": "trainer.settings.aggregation_settings",
    "AuditSettings": "trainer.settings.audit_settings",
    "AverageWeights": "trainer.averaging.averaging_callback",
    "BatchSettings": "pipelines.job.batch_settings",
    "Bounds": "accounting.core.intervals",
    "Certificate": "pipelines.core.batches.certificate",
    "ComparisonSettings": "trainer.settings.comparison_settings",
    "Dataset": "pipelines.inputs.parquet_blocks",
    "DpSgdPlan": "accounting.core.plan",
    "FunctionModel": "trainer.model.layers.function_model",
    "InputError": "accounting.core.validation",
    "Manifest": "pipelines.core.batches.manifest",
    "NoiseBounds": "accounting.core.intervals",
    "PhysicalBatch": "pipelines.core.batches.batch_format",
    "PoissonBatches": "pipelines.job.poisson_batches",
    "PredictSummary": "trainer.prediction.predict",
    "PreparedVerification": "pipelines.tables.prepared_files",
    "PrivacyStatement": "accounting.core.statement",
    "PrivateModel": "trainer.keras_model",
    "Request": "trainer.run.preflight",
    "RunRecord": "trainer.core.run.run_record",
    "Runtime": "pipelines.job.runtime.tasks",
    "Schema": "pipelines.tables.schema.schema",
    "BiasSettings": "trainer.papers.settings",
    "ShiftSettings": "trainer.papers.settings",
    "SimulationSettings": "trainer.papers.settings",
    "Summary": "trainer.train",
    "TableOptions": "pipelines.tables.table_format",
    "TrainSettings": "trainer.settings.train_settings",
    "UserLevels": "trainer.settings.user_levels",
    "VarianceSettings": "trainer.papers.settings",
    "Verification": "pipelines.batches.verify",
    "accountant": "accounting",
    "audit": "trainer.auditing.audit",
    "budget": "accounting.planning",
    "certify": "pipelines.certify",
    "cli": "dpsgd.command_line",
    "compare": "trainer.experiments.compare",
    "first_schema": "pipelines.tables.schema.first_schema",
    "list_blocks": "pipelines.inputs.parquet_blocks",
    "main": "dpsgd.command_line",
    "make_batches": "pipelines.job.make_batches",
    "make_layout": "pipelines.job.sizing",
    "make_private": "trainer.keras_model",
    "predict": "trainer.prediction.predict",
    "prepare": "pipelines.tables.job.prepare_job",
    "privacy_statement": "accounting.core.statement",
    "read_batches": "pipelines.batches.reader",
    "read_certificate": "pipelines.batches.folder",
    "read_manifest": "pipelines.batches.folder",
    "read_run": "trainer.core.run.run_record",
    "run_statement": "trainer.run.privacy",
    "measure_bias": "trainer.papers.bias",
    "shift": "trainer.papers.shift",
    "simulate": "trainer.papers.simulate",
    "steps_per_epoch": "accounting.core.plan",
    "train": "trainer.train",
    "variance": "trainer.papers.variance",
    "verify": "pipelines.batches.verify",
    "verify_prepared": "pipelines.tables.prepared_files",
    "write_batches": "pipelines.job.poisson_batching",
    "write_report": "trainer.html_report.page",
}
#: Top-level package -> the extra that installs its dependencies.
_EXTRAS = {
    "accounting": "accounting",
    "dpsgd": "train",
    "pipelines": "pipelines",
    "trainer": "train",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use.

    Raises:
      AttributeError: there is no such public name.
      ModuleNotFoundError: a package that the name needs is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    try:
        module = importlib.import_module(home)
        # The public name may be a module, such as "accountant".
        if not hasattr(module, name):
            importlib.import_module(f"{home}.{name}")
    except ModuleNotFoundError as error:
        extra = _EXTRAS[home.partition(".")[0]]
        raise ModuleNotFoundError(
            f"Expected the package {error.name} to be installed, which {name} needs. "
            f"Run, in a clone of the project: pip install '.[{extra}]'",
            name=error.name,
        ) from error
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    """Returns all public names, imported or not."""
    return sorted(__all__)
