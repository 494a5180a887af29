"""Gradients of single examples by the operations that use a weight."""
