"""Who may import what: who looks something up waits for no heavy library."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

HEAVY = {
    "apache_beam",
    "tensorflow",
    "keras",
    "tensorflow_privacy",
    "scipy",
    "dp_accounting",
    "matplotlib",
    "pyarrow",
    "numpy",
}
FRAMEWORKS = {"apache_beam", "tensorflow", "keras", "tensorflow_privacy"}

_PROBE = """
import runpy, sys
sys.argv = {argv!r}
try:
    {code}
except SystemExit:
    pass
print("LOADED", *sorted({{name.split(".")[0] for name in sys.modules}}))
"""


def loaded(root: pathlib.Path, code: str, *arguments: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after ``code``."""
    probe = _PROBE.format(argv=["dpsgd", *arguments], code=code)
    result = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(result.stdout.rsplit("LOADED", 1)[1].split())


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("accounting", HEAVY),
        ("pipelines", HEAVY),
        ("trainer", HEAVY),
        ("dpsgd", HEAVY),
        ("accounting.core.plan", HEAVY),
        ("accounting.core.validation", HEAVY),
        ("accounting.core.sampler_registry", HEAVY),
        ("trainer.settings.method_settings", HEAVY),
        ("trainer.settings.request", HEAVY - {"numpy"}),
        (
            "accounting.core.accountant",
            FRAMEWORKS | {"scipy", "dp_accounting", "matplotlib"},
        ),
        (
            "accounting.cli.commands",
            FRAMEWORKS | {"scipy", "dp_accounting", "matplotlib"},
        ),
        ("accounting.core.statement", FRAMEWORKS | {"matplotlib"}),
        ("pipelines.core.resample", FRAMEWORKS),
        ("pipelines.certify", FRAMEWORKS),
        ("pipelines.sampling.samplers", FRAMEWORKS),
        ("pipelines.core.batches.batch_format", FRAMEWORKS),
        # An accountant reads manifests, and installs nothing that reads batches.
        ("pipelines.batches.folder", FRAMEWORKS | {"google_crc32c", "pyarrow"}),
        ("pipelines.files.key_files", FRAMEWORKS),
        ("pipelines.files.storage", HEAVY),
        ("pipelines.files.folders", HEAVY),
        ("pipelines.batches.reader", FRAMEWORKS),
        ("pipelines.batches.verify", FRAMEWORKS),
        ("pipelines.cli.data_commands", FRAMEWORKS),
        ("pipelines.cli.batch_commands", FRAMEWORKS),
        ("pipelines.job.transforms", {"tensorflow", "keras", "tensorflow_privacy"}),
        ("pipelines.job.poisson_batching", {"tensorflow", "keras", "trainer"}),
        ("trainer.core.run.run_record", FRAMEWORKS | {"google_crc32c", "pyarrow"}),
        ("trainer.cli.commands", FRAMEWORKS | {"scipy", "matplotlib", "pyarrow"}),
        (
            "trainer.cli.audit_commands",
            FRAMEWORKS | {"scipy", "dp_accounting", "matplotlib"},
        ),
        ("pipelines.job.batch_settings", HEAVY),
        ("trainer.experiments.compare", FRAMEWORKS),
        ("trainer.papers.simulate", FRAMEWORKS),
        ("trainer.papers.bias", FRAMEWORKS),
        ("trainer.papers.variance", FRAMEWORKS),
        ("trainer.papers.shift", FRAMEWORKS),
        ("trainer.auditing.audit", FRAMEWORKS),
        ("trainer.auditing.audit_mechanism", FRAMEWORKS),
        ("trainer.auditing.audit_training", FRAMEWORKS),
        ("trainer.auditing.audit_report", FRAMEWORKS),
        ("trainer.cli.report_commands", HEAVY - {"numpy"}),
        ("trainer.html_report.page", FRAMEWORKS),
        ("trainer.train", {"apache_beam"}),
    ],
)
def test_a_module_loads_no_more_than_it_may(
    root: pathlib.Path, module: str, forbidden: set[str]
) -> None:
    assert not loaded(root, f"import {module}") & forbidden


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("plan", "--help"),
        ("account", "--help"),
        ("audit", "--help"),
        ("train", "--help"),
        ("batches", "--help"),
        ("prepare", "--help"),
        ("synth", "--help"),
        ("verify", "--help"),
        ("compare", "--help"),
        ("simulate", "--help"),
        ("bias", "--help"),
        ("variance", "--help"),
        ("shift", "--help"),
        ("demo", "--help"),
        ("report", "--help"),
        ("fit", "--help"),
        ("budget", "--help"),
        ("evaluate", "--help"),
        ("statistics", "--help"),
        ("tune", "--help"),
    ],
)
def test_help_loads_nothing_heavy(
    root: pathlib.Path, arguments: tuple[str, ...]
) -> None:
    names = loaded(root, "runpy.run_module('dpsgd', run_name='__main__')", *arguments)
    assert not names & (HEAVY - {"numpy"})


PLAN = (
    "--num-examples=36800000", "--batch-size=1024", "--epochs=1", "--delta=2.7e-8",
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", *PLAN, "--epsilon=5", "--sampler=truncated-poisson"),
        ("account", *PLAN, "--sampler=poisson", "--noise-multiplier=0.5"),
    ],
)
def test_plan_and_account_load_no_framework(
    root: pathlib.Path, arguments: tuple[str, ...]
) -> None:
    names = loaded(root, "runpy.run_module('dpsgd', run_name='__main__')", *arguments)
    assert not names & FRAMEWORKS


def test_the_import_contracts_hold(root: pathlib.Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c"
         "; c(standalone_mode=True)", "--no-cache"],  # which two runs would share
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
