"""Run regions of a captured block chunk by chunk, forward and backward."""
