"""A Flink cluster: one JobManager, and a TaskManager on every worker host."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import yaml

from tests.engines.harness import parts
from tests.engines.harness.cluster import Cluster, environment
from tests.engines.harness.embedded import OPENS
from tests.engines.harness.hosts import HEAD, Process
from tests.engines.harness.polling import wait_for

CONFIG = parts.DEPLOY / "flink" / "config.yaml"
_PORT = 8081
_UNITS = {"k": 10, "m": 20, "g": 30}


def memory_options(config: dict[str, Any]) -> list[str]:
    """Returns the memory limits of a TaskManager's Java, from its configuration."""
    memory = config["taskmanager"]["memory"]
    task, framework = memory["task"], memory["framework"]
    heap = _bytes(task["heap"]["size"]) + _bytes(framework["heap"]["size"])
    direct = _bytes(task["off-heap"]["size"]) + _bytes(framework["off-heap"]["size"])
    direct += _bytes(memory["network"]["max"])
    metaspace = _bytes(memory["jvm-metaspace"]["size"])
    return [
        f"-Xms{heap}",
        f"-Xmx{heap}",
        f"-XX:MaxDirectMemorySize={direct}",
        f"-XX:MaxMetaspaceSize={metaspace}",
    ]


def java_options(config: dict[str, Any], name: str) -> list[str]:
    """Returns the Java options of one kind of process.

    Args:
      config: Flink's configuration.
      name: "jobmanager" or "taskmanager".
    """
    return config["env"]["java"]["opts"][name].split()


def _bytes(text: str) -> int:
    return int(text[:-1]) << _UNITS[text[-1]]


class FlinkCluster(Cluster):
    """One JobManager on the head, and a TaskManager on every worker host."""

    engine = "flink"
    _starts = itertools.count()

    def start_master(self) -> None:
        (self.folder / "conf").mkdir(exist_ok=True)
        shutil.copy(CONFIG, self.folder / "conf" / "config.yaml")
        self.master = self._java(
            HEAD,
            "jobmanager",
            ["-Xmx768m"],
            "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint",
            {"rest.address": self._head},
        )
        wait_for("Flink's JobManager", lambda: self._get("overview") is not None)

    def start_engine(self, host: str) -> None:
        self.engines[host] = self._java(
            host,
            "taskmanager",
            memory_options(self._config),
            "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
            {
                "taskmanager.host": self.hosts.address(host),
                "taskmanager.resource-id": f"{host}-{next(self._starts)}",
                "io.tmp.dirs": str(self.folder),
            },
        )

    def num_engines(self) -> int:
        overview = self._get("overview") or {}
        return overview.get("taskmanagers", 0)

    def job_server_options(self) -> list[str]:
        return ["--flink-master", f"{self._head}:{_PORT}"]

    def cancel_jobs(self) -> None:
        def none_left() -> bool:
            jobs = self._get("jobs") or {"jobs": [{"id": "", "status": "RUNNING"}]}
            ended = ("CANCELED", "FAILED", "FINISHED")
            left = [job for job in jobs["jobs"] if job["status"] not in ended]
            for job in left:
                self.hosts.get(self._url(f"jobs/{job['id']}?mode=cancel"), "PATCH")
            return not left

        wait_for("Flink to cancel what is left of a job", none_left)

    @property
    def _config(self) -> dict[str, Any]:
        return yaml.safe_load(CONFIG.read_text())

    @property
    def _head(self) -> str:
        return self.hosts.address(HEAD)

    def _java(
        self,
        host: str,
        name: str,
        options: list[str],
        main: str,
        settings: dict[str, str],
    ) -> Process:
        settings = {"jobmanager.rpc.address": self._head, **settings}
        dynamic = [word for item in settings.items() for word in ("-D", "=".join(item))]
        jars = f"{parts.cluster_jars('flink')}/*"
        options = [*OPENS, *java_options(self._config, name), *options]
        command = ["java", *options, "-cp", jars, main]
        command += ["--configDir", str(self.folder / "conf"), *dynamic]
        return self.hosts.start(host, f"flink-{name}", command, environment())

    def _get(self, path: str) -> Any:
        return self.hosts.get(self._url(path))

    def _url(self, path: str) -> str:
        return f"http://{self._head}:{_PORT}/{path}"
