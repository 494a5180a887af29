"""Private training on exactly the batches that a plan describes.

Modules are imported by name (``from trainer import train``); this package imports
nothing, so that ``dpsgd account`` reads a run without TensorFlow.
"""
