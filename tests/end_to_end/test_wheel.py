"""A wheel of the checkout works in an environment without it, in another folder."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

PACKAGES = ("accounting", "dpsgd", "pipelines", "trainer")
PLAN = (
    "plan", "--num-examples=16000", "--batch-size=256", "--epochs=2", "--epsilon=3",
    "--delta=1e-6",
)  # fmt: skip


def run(folder: pathlib.Path, *command: str | pathlib.Path) -> str:
    """Standard output of a command that succeeds and finds no checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from a copy: a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / package, folder / "source" / package, ignore=hidden)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder / "source")
    run(
        folder, sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
        "--no-build-isolation", "--no-index", "--wheel-dir", folder, folder / "source",
    )  # fmt: skip
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(
    wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The ``bin`` of an environment of the wheel, and of the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(folder, sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(
        folder, sys.executable, "-m", "pip", "--python", python, "install", "--quiet",
        "--no-deps", "--no-index", wheel,
    )  # fmt: skip
    # A path file adds a folder without that folder's own path files: those that lead
    # to the checkout stay out.
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


def test_the_wheel_holds_every_module_and_its_types(
    root: pathlib.Path, wheel: pathlib.Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
    }
    templates = {"trainer/html_report/report.html.jinja"}
    assert held == modules | templates | {f"{name}/py.typed" for name in PACKAGES}


def test_it_runs_without_the_checkout(
    root: pathlib.Path, installed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert "dpsgd train" in run(tmp_path, installed / "dpsgd", "--help")
    assert "truncated-poisson" in run(tmp_path, installed / "dpsgd", *PLAN)
    code = (
        "import dpsgd\n"
        "from dpsgd import DpSgdPlan, PoissonBatches, read_batches\n"
        "for thing in (dpsgd, read_batches, PoissonBatches):\n"
        "    name = getattr(thing, '__module__', thing.__name__)\n"
        "    print(__import__('sys').modules[name].__file__)\n"
    )
    files = run(tmp_path, installed / "python", "-c", code).split()
    assert len(files) == 3
    assert all(pathlib.Path(file).is_relative_to(installed.parent) for file in files)
    assert not any(pathlib.Path(file).is_relative_to(root) for file in files)


@pytest.mark.slow
def test_the_demo_runs_without_the_checkout(
    installed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    run(tmp_path, installed / "dpsgd", "demo", "--rows=50000")
    assert "epsilon" in (tmp_path / "demo" / "report.md").read_text().lower()
    assert (tmp_path / "demo" / "dp-sgd" / "model.keras").exists()
