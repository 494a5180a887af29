"""What engines are built from: checksums, Java, and limits that fit together."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import yaml

from accounting.core.validation import InputError
from tests.engines.harness import parts, spark
from tests.engines.harness.flink import CONFIG, memory_options


def test_without_maven_the_error_says_how_to_get_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no mvn there, and no apt-get
    with pytest.raises(InputError, match=r"Maven \(mvn\).*apt-get install maven"):
        parts._maven()
    program = tmp_path / "mvn"
    program.touch(mode=0o755)
    assert parts._maven() == str(program)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.9" 2023', 17),
        ('java version "1.8.0_392"', 1),
        ("?", None),
    ],
)
def test_java_is_asked_for_its_version(
    tmp_path: pathlib.Path, text: str, version: int | None
) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    java.chmod(0o755)
    assert parts.java_version(java) == version
    assert parts.java_version(tmp_path / "none") is None


def test_what_is_missing_is_told_with_the_command(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FOLDER", tmp_path)
    assert "`make engines-embedded`" in (parts.missing() or "")


def test_a_changed_pin_is_another_part(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flink").mkdir()
    monkeypatch.setattr(parts, "DEPLOY", tmp_path)
    names = set()
    for text in ("1", "2", "1"):
        (tmp_path / "flink" / "pom.xml").write_text(text)
        names.add(parts.job_server("flink"))
    assert len(names) == 2


def test_comments_are_no_settings_of_spark() -> None:
    text = "# a comment\n\n#spark.a 1\nspark.b   two words\n"
    assert spark.read_settings(text) == {"spark.b": "two words"}
    assert all(name.startswith("spark.") for name in settings_of_the_cluster())


def settings_of_the_cluster() -> dict[str, str]:
    settings = spark.read_settings(spark.CONFIG.read_text())
    assert len(settings) >= 5
    return settings


def test_shares_on_spark_are_the_records_of_the_stages_that_sample_and_write() -> None:
    def stage(number: int, name: str) -> dict[str, Any]:
        info = {"Stage ID": number, "Stage Name": name}
        return {"Event": "SparkListenerStageSubmitted", "Stage Info": info}

    def task(number: int, host: str, records: int, end: str = "Success") -> Any:
        return {
            "Event": "SparkListenerTaskEnd",
            "Stage ID": number,
            "Task End Reason": {"Reason": end},
            "Task Info": {"Host": host},
            "Task Metrics": {"Shuffle Read Metrics": {"Total Records Read": records}},
        }

    events = [
        # All blocks are numbered by one worker, and sampled by both.
        stage(1, "mapPartitionsToPair at GroupNonMergingWindowsFunctions"),
        task(1, "a", 46),
        stage(2, "repartition at GroupCombineFunctions"),
        task(2, "a", 100),
        stage(3, "mapPartitionsToPair at GroupNonMergingWindowsFunctions"),
        task(3, "a", 9),
        task(3, "b", 4),
        task(3, "b", 6, "FetchFailed"),
        task(3, "b", 6),
        stage(4, "repartition at GroupCombineFunctions"),
        task(4, "b", 1),
        stage(5, "foreach at BoundedDataset"),
        task(5, "a", 3),
        task(5, "b", 5),
    ]
    read, written = spark.records_by_stage(events)
    assert read == {"a": 9, "b": 10}
    assert written == {"a": 3, "b": 5}


def test_the_memory_of_a_taskmanager_adds_up() -> None:
    """Flink refuses to start unless Java's limits are those of the configuration."""
    options = memory_options(yaml.safe_load(CONFIG.read_text()))
    assert f"-Xmx{512 << 20}" in options  # 384 + 128
    assert f"-XX:MaxDirectMemorySize={256 << 20}" in options  # 64 + 128 + 64
    assert f"-XX:MaxMetaspaceSize={256 << 20}" in options
