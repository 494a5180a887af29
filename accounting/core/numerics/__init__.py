"""Searches that end on the private side."""
