"""Averages of iterates and their spread: post-processing at no privacy cost."""
