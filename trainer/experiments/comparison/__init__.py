"""Comparison of runs at equal noise or equal epsilon: cases, noise, runs, tables."""
