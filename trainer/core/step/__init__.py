"""One step: gradients of single examples, the bounded sum of them, its noise."""
