"""Real engines on this machine: built from pinned parts, started, used, hurt, stopped.

``python -m tests.engines.harness --help`` lists commands; ``make engines`` runs all.
"""
