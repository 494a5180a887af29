"""Bounds by theorems of their own, each with tests against the core alone."""
