"""Which rows are in which steps, as the batch job chooses them."""
