"""Privacy accounting for the ways in which batches are really made.

Modules are imported by name (``from accounting import plan``); this package imports
nothing, so that the command line starts fast.
"""
