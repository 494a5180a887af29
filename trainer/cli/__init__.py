"""The commands around training."""
