"""Harmless-looking modules by what they do, each trained on grids of ranks."""
