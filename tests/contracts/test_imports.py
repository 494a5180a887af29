"""Who may import what: who looks something up waits for no heavy library."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

from dpsgd.command_line import COMMANDS

FRAMEWORKS = {"apache_beam", "tensorflow", "keras", "tensorflow_privacy"}
SLOW = FRAMEWORKS | {"scipy", "dp_accounting", "matplotlib"}
HEAVY = SLOW | {"pyarrow", "numpy", "rich"}
#: What reads batches; who reads a record of a run need not install it.
OF_BATCHES = {"google_crc32c", "pyarrow"}

_PROBE = """
import runpy, sys
for forbidden, line in {lines!r}:
    sys.argv = ["dpsgd", *line.split()[1:]]
    try:
        exec(line) if line.startswith(("import ", "from ")) else runpy.run_module(
            line.split()[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, line
    found = set(forbidden) & {{name.split(".")[0] for name in sys.modules}}
    if found:
        print("\\nLOADED", line, *sorted(found))
        break
"""


def loaded(root: pathlib.Path, *rules: tuple[set[str], list[str]]) -> str:
    """The first line that loads a forbidden package in a fresh process; else empty.

    Args:
      root: The root of the repository.
      rules: Names of packages, each time a subset of those before, and imports, or
        commands such as ``dpsgd plan --help``, in this order.
    """
    probe = _PROBE.format(lines=[(names, one) for names, each in rules for one in each])
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.partition("\nLOADED ")[2]


#: Chains of what must not be loaded, and of the modules that must not load it.
CHAINS = [
  [
    (HEAVY, """accounting pipelines trainer dpsgd accounting.core.plan
     accounting.core.validation accounting.core.sampler_registry
     accounting.core.accountant accounting.statement accounting.cli.plan_command
     accounting.comparison
     trainer.settings.methods pipelines.files.storage pipelines.files.outputs
     pipelines.job.batch_settings"""),
    (HEAVY - {"numpy"}, "trainer.settings.requests"),
    (SLOW, "trainer.cli.account_commands trainer.cli.run_commands"),
    (FRAMEWORKS, """pipelines.core.resample pipelines.certify
     pipelines.core.choices pipelines.core.batches.batch_format
     pipelines.files.key_sources pipelines.batches.folder pipelines.batches.verify
     pipelines.cli.data_commands pipelines.cli.batch_commands
     pipelines.cli.data_body
     trainer.experiments.compare trainer.auditing trainer.html_report.page"""),
    ({"apache_beam"}, "trainer.train"),
  ],
  [(FRAMEWORKS | {"scipy", "matplotlib", "pyarrow"}, "trainer.cli.train_command")],
  [(FRAMEWORKS | OF_BATCHES, "trainer.core.run.run_record")],
  [(FRAMEWORKS - {"apache_beam"} | {"trainer"},
    "pipelines.job.transforms pipelines.job.poisson_batching")],
]  # fmt: skip


@pytest.mark.parametrize(
    "chain", CHAINS, ids=[chain[0][1].split()[0] for chain in CHAINS]
)
def test_a_module_loads_no_more_than_it_may(
    root: pathlib.Path, chain: list[tuple[set[str], str]]
) -> None:
    rules = [
        (names, [f"import {one}" for one in each.split()]) for names, each in chain
    ]
    assert not loaded(root, *rules)


def test_help_loads_nothing_heavy(root: pathlib.Path) -> None:
    lines = [f"dpsgd {name} --help" for name in ("", *COMMANDS)]
    assert not loaded(root, (HEAVY - {"numpy", "rich"}, lines))


def test_no_modules_import_each_other(root: pathlib.Path) -> None:
    """Also by imports within functions, and for types alone."""
    packages = ("accounting", "dpsgd", "pipelines", "trainer")
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for package in packages
        for path in (root / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    imported: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = imported.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{each.name}" for each in node.names}
                found.add(str(node.module))
        found &= modules.keys() - {name}
    graphlib.TopologicalSorter(imported).prepare()  # raises if there is a circle
