"""A second opinion on an epsilon, by other accountants or by simulation."""
