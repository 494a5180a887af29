"""Settings of runs and experiments: frozen, public, checked before any work."""
