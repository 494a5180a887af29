"""Attacks on the mechanism and on whole small runs."""
