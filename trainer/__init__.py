"""Private training on exactly the batches of a plan.

Modules are imported by name (``from trainer import train``); this package imports
nothing, so that ``dpsgd account`` reads a run without TensorFlow.
"""
