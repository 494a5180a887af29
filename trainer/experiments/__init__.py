"""Experiments of many runs: comparisons, predictions, the spread of iterates."""
