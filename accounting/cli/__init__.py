"""The commands that ask the accountant."""
