"""Settings of runs and experiments: frozen, public, checked when they are made.

A value out of range is an InputError with the name, the value, the bound and a remedy.
"""
