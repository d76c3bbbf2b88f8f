"""One training step: weights by cells, finite checks, metrics counted once, its time."""
