"""Other accountants asked for the epsilon of a plan."""
