"""Poisson batches at any size: sampling, the Beam job, and the batch format.

This package imports nothing, so that a reader of batches needs no Beam.
"""
