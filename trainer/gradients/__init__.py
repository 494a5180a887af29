"""Per-example gradients, clipped, summed, with noise: one private step."""
