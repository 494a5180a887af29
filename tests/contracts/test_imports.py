"""Who may import what: who looks something up waits for no heavy library."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from dpsgd.command_line import COMMANDS

FRAMEWORKS = {"apache_beam", "tensorflow", "keras", "tensorflow_privacy"}
SLOW = FRAMEWORKS | {"scipy", "dp_accounting", "matplotlib"}
HEAVY = SLOW | {"pyarrow", "numpy"}
#: What reads batches; who reads a manifest need not install it.
OF_BATCHES = {"google_crc32c", "pyarrow"}

_PROBE = """
import runpy, sys
forbidden = {forbidden!r}
for line in {lines!r}:
    sys.argv = ["dpsgd", *line.split()[1:]]
    try:
        exec(line) if line.startswith(("import ", "from ")) else runpy.run_module(
            line.split()[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, line
    found = forbidden & {{name.split(".")[0] for name in sys.modules}}
    if found:
        print("\\nLOADED", line, *sorted(found))
        break
"""


def loaded(root: pathlib.Path, forbidden: set[str], *lines: str) -> str:
    """The first line that loads a forbidden package in a fresh process; else empty.

    Args:
      root: The root of the repository.
      forbidden: Names of packages.
      lines: Imports, or commands such as ``dpsgd plan --help``, in this order.
    """
    probe = _PROBE.format(forbidden=forbidden, lines=lines)
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.partition("\nLOADED ")[2]


#: What must not be loaded, and the modules that must not load it.
RULES = [
    (HEAVY, """accounting pipelines trainer dpsgd accounting.core.plan
     accounting.core.validation accounting.core.sampler_registry
     trainer.settings.method_settings pipelines.files.storage pipelines.files.folders
     pipelines.job.batch_settings"""),
    (HEAVY - {"numpy"}, "trainer.settings.request trainer.cli.report_commands"),
    (SLOW, """accounting.core.accountant accounting.cli.commands
     trainer.cli.audit_commands"""),
    (FRAMEWORKS | {"matplotlib"}, "accounting.core.statement"),
    (FRAMEWORKS | {"scipy", "matplotlib", "pyarrow"}, "trainer.cli.commands"),
    (FRAMEWORKS | OF_BATCHES, "pipelines.batches.folder trainer.core.run.run_record"),
    (FRAMEWORKS, """pipelines.core.resample pipelines.certify
     pipelines.sampling.samplers pipelines.core.batches.batch_format
     pipelines.files.key_files pipelines.batches.reader pipelines.batches.verify
     pipelines.cli.data_commands pipelines.cli.batch_commands
     trainer.experiments.compare trainer.papers.simulate trainer.papers.bias
     trainer.papers.variance trainer.papers.shift trainer.auditing.audit
     trainer.auditing.audit_mechanism trainer.auditing.audit_training
     trainer.auditing.audit_report trainer.html_report.page"""),
    (FRAMEWORKS - {"apache_beam"} | {"trainer"},
     "pipelines.job.transforms pipelines.job.poisson_batching"),
    ({"apache_beam"}, "trainer.train"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("forbidden", "modules"), RULES, ids=[names.split()[0] for _, names in RULES]
)
def test_a_module_loads_no_more_than_it_may(
    root: pathlib.Path, forbidden: set[str], modules: str
) -> None:
    lines = [f"import {module}" for module in modules.split()]
    assert not loaded(root, forbidden, *lines)


def test_help_loads_nothing_heavy(root: pathlib.Path) -> None:
    lines = [f"dpsgd {name} --help" for name in ("", *COMMANDS)]
    assert not loaded(root, HEAVY - {"numpy"}, *lines)


PLAN = "--num-examples=36800000 --batch-size=1024 --epochs=1 --delta=2.7e-8"


def test_plan_and_account_load_no_framework(root: pathlib.Path) -> None:
    lines = (
        f"dpsgd account {PLAN} --sampler=poisson --noise-multiplier=0.5",
        f"dpsgd plan {PLAN} --epsilon=5 --sampler=truncated-poisson",
    )
    assert not loaded(root, FRAMEWORKS, *lines)


def test_the_import_contracts_hold(root: pathlib.Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c"
         "; c(standalone_mode=True)", "--no-cache"],  # which two runs would share
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
