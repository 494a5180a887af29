"""Cells of a column: their numbers, texts and times."""
