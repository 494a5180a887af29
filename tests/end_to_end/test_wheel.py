"""A wheel of the checkout works without it, in another folder: the demo, all of it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

PACKAGES = ("accounting", "dpsgd", "pipelines", "trainer")
PLAN = (
    "plan", "--num-examples=16000", "--batch-size=256", "--epochs=2", "--epsilon=3",
    "--delta=1e-6", "--sampler=truncated-poisson",
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
        "--no-deps", "--no-index", "--no-compile", wheel,
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
    templates = {
        "trainer/html_report/report.html.jinja",
        "pipelines/tables/criteo.toml",
    }
    assert held == modules | templates | {f"{name}/py.typed" for name in PACKAGES}


def test_it_runs_without_the_checkout(
    root: pathlib.Path, installed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert "Train on batches" in run(tmp_path, installed / "dpsgd", "--help")
    assert "truncated-poisson" in run(tmp_path, installed / "dpsgd", *PLAN)
    imports = "".join(f"import {name}; print({name}.__file__);" for name in PACKAGES)
    files = run(tmp_path, installed / "python", "-c", imports).split()
    assert len(files) == len(PACKAGES)
    assert all(pathlib.Path(file).is_relative_to(installed.parent) for file in files)
    assert not any(pathlib.Path(file).is_relative_to(root) for file in files)


@pytest.fixture(scope="module")
def demo(
    installed: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, str]:
    """The folder of a demo of fewer rows than a person would give it; its output."""
    folder = tmp_path_factory.mktemp("demo")
    printed = run(folder, installed / "dpsgd", "demo", "--rows=60000", "--epsilon=4")
    return folder / "demo", printed


@pytest.mark.thorough
def test_the_demo_runs_without_the_checkout_and_ends_in_a_report(
    demo: tuple[pathlib.Path, str],
) -> None:
    folder, printed = demo
    assert re.search(r"\((3\.99\d*|4\.0*), ", printed)
    page = (folder / "report.html").read_text()
    assert "Privacy report: dp-sgd" in page
    assert page.count('src="data:image/png;base64,') == 1
    averages = r'<th scope="row">(ema|past_ema|upa|opa|omv): '
    assert len(re.findall(averages, page)) == 5
    assert f"report: {pathlib.Path('demo') / 'report.html'}" in printed


@pytest.mark.thorough
def test_the_demo_learns_and_most_of_it_survives_the_noise(
    demo: tuple[pathlib.Path, str],
) -> None:
    auc = {
        name: json.loads((demo[0] / name / "metrics.json").read_bytes())["auc"]
        for name in ("dp-sgd", "non-private")
    }
    assert auc["non-private"] > 0.75
    assert auc["dp-sgd"] > 0.65
