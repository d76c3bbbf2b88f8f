"""Run training steps: weights by cells, finite checks, metrics over the data axis, out-of-memory handling, timing."""
