"""Preparing a table on the workers of Apache Beam."""
