"""Experiments of the papers, and their commands: simulate, bias, shift, variance."""
