"""ModelMix: its own theorem of amplification."""
