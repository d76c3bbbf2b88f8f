"""Make the plan of a run, the same on every rank, and install it."""
