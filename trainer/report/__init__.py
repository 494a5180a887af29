"""Output of a run for people: progress, curves, plots, tables."""
