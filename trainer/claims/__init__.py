"""What makes a run faster or tighter by its own proof; see ``core.claim_names``."""
