"""The file of the diagnostics of clipping, and its columns."""

#: File in the private folder of a run, and its measurements of every step.
CLIPPING_BIAS_NAME = "non_private_clipping_bias.csv"
COLUMNS = ("magnitude", "direction", "bias", "cosine", "ascent_cosine")
