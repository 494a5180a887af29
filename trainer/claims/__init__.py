"""What makes a run faster or tighter by a proof of its own; see ``core.claims``."""
