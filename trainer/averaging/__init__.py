"""Averages of iterates, and what they say: free post-processing."""
