"""Gradients of single examples from one traced graph of the losses, in one pass."""
