"""Files of this machine: written as a whole, locked, private."""
