"""Questions before a run: comparisons of samplers, budgets, and cheap simulations."""
