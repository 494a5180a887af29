"""Builds, starts, tests and stops Flink and Spark on this machine, at pinned versions.

``python -m tests.engines.harness --help`` lists commands; ``make engines`` runs all.
"""
