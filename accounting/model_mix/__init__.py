"""ModelMix's theorem, and the proofs of what it rests on."""
