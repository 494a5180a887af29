"""One step of each epoch, uniformly random: bounds on its likelihood ratio."""
