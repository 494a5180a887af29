"""What is released beside a model: one Gaussian mechanism each."""
