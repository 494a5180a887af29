"""Keras layers and models made fit for gradients of single examples."""
