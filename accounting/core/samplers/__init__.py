"""Samplers whose bounds need no claim."""
