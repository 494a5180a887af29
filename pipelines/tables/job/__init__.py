"""Preparing a table on an engine of Apache Beam."""
