"""Privacy accounting for the samplers that batches are actually made with.

Modules are imported by name (``from accounting.core import plan``); this package
imports nothing, so that the command line starts fast.
"""
