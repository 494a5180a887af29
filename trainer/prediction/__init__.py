"""Predictions of a finished run for the rows of a table."""
