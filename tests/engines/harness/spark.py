"""A standalone Spark cluster: one master, and a worker on every worker host."""

from __future__ import annotations

import pathlib
import zipfile
from typing import Any

from tests.engines.harness import parts
from tests.engines.harness.cluster import Cluster, environment
from tests.engines.harness.embedded import OPENS
from tests.engines.harness.hosts import HEAD, Process
from tests.engines.harness.polling import wait_for

CONFIG = parts.DEPLOY / "spark" / "spark-defaults.conf"
_PORT, _UI_PORT, _DRIVER_PORT = 7077, 8080, 4040


def read_settings(text: str) -> dict[str, str]:
    """Returns name -> value of a text in the format of ``spark-defaults.conf``."""
    lines = [line.split(None, 1) for line in text.splitlines()]
    return {name: value for name, value in (x for x in lines if len(x) == 2)
            if not name.startswith("#")}  # fmt: skip


class SparkCluster(Cluster):
    """One master on the head, and a worker on every worker host."""

    engine = "spark"

    def start_master(self) -> None:
        with zipfile.ZipFile(self._empty_jar, "w"):
            pass
        self.master = self._java(
            HEAD,
            "master",
            "org.apache.spark.deploy.master.Master",
            ["--host", self._head, "--port", str(_PORT), "--webui-port", str(_UI_PORT)],
        )
        wait_for("Spark's master", lambda: self._master() is not None)

    def start_engine(self, host: str) -> None:
        work = self.folder / f"{host}-work"
        self.engines[host] = self._java(
            host,
            "worker",
            "org.apache.spark.deploy.worker.Worker",
            ["--host", self.hosts.address(host), "--cores", "1", "--memory", "2g",
             "--work-dir", str(work), self._url],
        )  # fmt: skip

    def num_engines(self) -> int:
        return (self._master() or {}).get("aliveworkers", 0)

    def options(self) -> list[str]:
        # The workers already have Beam's classes; otherwise every executor would fetch
        # 300 MB for every job.
        return [*super().options(), f"--files_to_stage={self._empty_jar}"]

    def job_server_options(self) -> list[str]:
        return ["--spark-master-url", self._url]

    def java_options(self) -> list[str]:
        # The job server is Spark's driver, and these are Spark's own settings.
        settings = {
            **read_settings(CONFIG.read_text()),
            # With small tasks a dead worker loses little work.
            "spark.default.parallelism": str(4 * len(self.hosts.workers)),
            "spark.driver.bindAddress": "0.0.0.0",
            "spark.driver.host": self._head,
            "spark.ui.port": str(_DRIVER_PORT),
            "spark.executor.extraClassPath": str(parts.job_server("spark")),
            "spark.executor.extraJavaOptions": " ".join(_java_options()),
        }
        return [f"-D{name}={value}" for name, value in settings.items()]

    def job_server_environment(self) -> dict[str, str]:
        return self._environment(HEAD)

    def cancel_jobs(self) -> None:
        """Does nothing: a Spark job ends with its driver, the job server."""

    @property
    def _empty_jar(self) -> pathlib.Path:
        return self.folder / "nothing.jar"

    @property
    def _head(self) -> str:
        return self.hosts.address(HEAD)

    @property
    def _url(self) -> str:
        return f"spark://{self._head}:{_PORT}"

    def _environment(self, host: str) -> dict[str, str]:
        return {
            **environment(),
            "SPARK_HOME": str(parts.cluster_jars("spark").parent),
            "SPARK_LOCAL_IP": self.hosts.address(host),
            "SPARK_LOCAL_DIRS": str(self.folder),
            # Without it every executor looks for a folder of Spark's own build.
            "SPARK_SCALA_VERSION": "2.12",
        }

    def _java(self, host: str, name: str, main: str, arguments: list[str]) -> Process:
        jars = f"{parts.cluster_jars('spark')}/*"
        options = [*_java_options(), "-Xmx512m"]
        command = ["java", *options, "-cp", jars, main, *arguments]
        return self.hosts.start(host, f"spark-{name}", command, self._environment(host))

    def _master(self) -> Any:
        return self.hosts.get(f"http://{self._head}:{_UI_PORT}/json/")


def _java_options() -> list[str]:
    """Returns options for every Java process of the cluster."""
    common = read_settings(CONFIG.read_text())
    return [*OPENS, *common["spark.executor.extraJavaOptions"].split()]
