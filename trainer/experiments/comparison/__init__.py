"""Runs compared at one noise or at one epsilon: cases, noise, runs, tables."""
