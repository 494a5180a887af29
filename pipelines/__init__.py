"""Poisson batches at any size: sampling, the Beam job, and the batch format.

Modules are imported by name (``from pipelines.batches import manifest``).  This package
imports nothing, so that a reader of batches needs no Beam and a worker no TensorFlow.
"""
