"""Epsilon of several mechanisms together, from their privacy profiles."""
