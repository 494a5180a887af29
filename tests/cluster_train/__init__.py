"""Several workers of `dpsgd train`, each a host of its own on this machine."""
