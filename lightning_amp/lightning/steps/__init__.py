"""Run one training step: weights by cells, finite checks, metrics counted once, timing."""
