"""The Beam job: sample, group by step, pack, write."""
