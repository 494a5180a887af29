"""The public names of this project, each imported when it is first used.

    from dpsgd import DpSgdPlan, accountant, read_batches

``import dpsgd`` loads neither NumPy nor a framework.  A name loads only what it needs:
``read_batches`` loads neither Beam nor TensorFlow.  A type checker sees under each name
the object that the name has at run time.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

# The one list of public names.  `as` tells type checkers that a name is re-exported.
if TYPE_CHECKING:
    from accounting.core import accountant as accountant
    from accounting.core.plan import DpSgdPlan as DpSgdPlan
    from accounting.core.validation import InputError as InputError
    from dpsgd.frames import fit as fit
    from dpsgd.frames import predict as predict
    from dpsgd.private_model import make_private as make_private
    from dpsgd.questions import account as account
    from dpsgd.questions import plan as plan
    from pipelines.batches.folder import read_batches as read_batches
    from pipelines.batches.folder import read_manifest as read_manifest
    from pipelines.batches.verify import verify as verify
    from pipelines.inputs.parquet_blocks import list_blocks as list_blocks
    from pipelines.job.batch_settings import BatchSettings as BatchSettings
    from pipelines.job.poisson_batching import PoissonBatches as PoissonBatches
    from pipelines.job.poisson_batching import make_batches as make_batches
    from pipelines.tables.first_schema import first_schema as first_schema
    from pipelines.tables.prepare import TableOptions as TableOptions
    from pipelines.tables.prepare import prepare as prepare
    from pipelines.tables.schema import Schema as Schema
    from trainer.html_report.page import write_report as write_report
    from trainer.model.layers import FunctionModel as FunctionModel
    from trainer.releases.evaluate import evaluate as evaluate
    from trainer.run.preflight import Request as Request
    from trainer.settings.train_settings import TrainSettings as TrainSettings
    from trainer.train import train as train

__version__ = "0.2.0"


def _homes() -> dict[str, str]:
    """Returns public name -> module that defines it, from the imports above."""
    source = pkgutil.get_data(__name__, "__init__.py")
    assert source is not None  # the loader of this file has it
    return {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }


_HOMES = _homes()

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
    module = importlib.import_module(home)
    # The public name may be a module, such as "accountant".
    if not hasattr(module, name):
        importlib.import_module(f"{home}.{name}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    """Returns all public names, imported or not."""
    return sorted(__all__)
