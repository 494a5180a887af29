"""Keras layers made fit for gradients of single examples."""
